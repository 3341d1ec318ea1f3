"""A study plus the shape and classes of its data: model, parameter spec and codecs, equal on coordinator and sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.codecs.base import VectorLayout
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.compression import UpdateCompression
from pipeline.strategies.base import StrategyContext
from pipeline.strategies.dry_run import DryRunRound, dry_run
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study

if TYPE_CHECKING:
    from torch import nn

    from models.networks.base import ModelConfig


@dataclass(frozen=True)
class RunSpec:
    study: Study
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    num_sites: int

    def build_model(self) -> nn.Module:
        model: ModelConfig = self.study.model
        return model.init_network(self.shape, len(self.classes), self.study.seed)

    def lr(self, round: int) -> float:
        return self.study.local.lr_at_round(round, self.study.rounds)

    @cached_property
    def parameter_spec(self) -> ParameterSpec:
        return ParameterSpec.from_module(self.build_model())

    @cached_property
    def initial_state(self) -> ModelState:
        return self.parameter_spec.read_state(self.build_model())

    @cached_property
    def context(self) -> StrategyContext:
        local = self.study.local
        return StrategyContext(self.parameter_spec, self.num_sites, self.lr, self.study.seed, local.epochs, local.steps)

    @cached_property
    def dry_run_rounds(self) -> list[DryRunRound]:
        """Jobs and updates of a dry run of the strategy; empty without [privacy]."""
        return (
            dry_run(self.study.strategy, self.context, self.initial_state)
            if self.study.privacy != PrivacyConfig()
            else []
        )

    @cached_property
    def compression(self) -> UpdateCompression:
        return UpdateCompression(
            self.study.uplink_codecs,
            self.study.compression.downlink,
            VectorLayout(self.parameter_spec.parameter_sizes, self.num_sites),
            self.study.seed,
        )


def model_header(study: Study, shape: Sequence[int], classes: Sequence[str], round: int) -> dict[str, Any]:
    """Header of a saved model file."""
    header = {"model": study.to_dict()["model"], "shape": shape, "classes": classes}
    return header | {"round": round, "study": study.name, "study_hash": study.hash}
