"""What follows from a study once the shape and the classes of its data are known; the same at every place that works on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline.codecs.base import Layout
from pipeline.core.parameters import Snapshot, Spec
from pipeline.protocol.compression import Wire
from pipeline.strategies.base import Plan
from pipeline.strategies.dry_run import Turn, rehearse
from pipeline.study.privacy import Privacy
from pipeline.study.schema import Study

if TYPE_CHECKING:
    from torch import nn

    from models.networks.base import Model


@dataclass(frozen=True)
class Blueprint:
    study: Study
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    sites: int

    def make(self) -> nn.Module:
        model: Model = self.study.model
        return model.make(self.shape, len(self.classes), self.study.seed)

    def lr(self, round: int) -> float:
        return self.study.local.rate(round, self.study.rounds)

    @cached_property
    def spec(self) -> Spec:
        return Spec.of(self.make())

    @cached_property
    def start(self) -> Snapshot:
        return self.spec.read(self.make())

    @cached_property
    def plan(self) -> Plan:
        local = self.study.local
        return Plan(self.spec, self.sites, self.lr, self.study.seed, local.epochs, local.steps)

    @cached_property
    def turns(self) -> list[Turn]:
        """Rehearsed, where the study protects anything."""
        return rehearse(self.study.strategy, self.plan, self.start) if self.study.privacy != Privacy() else []

    @cached_property
    def wire(self) -> Wire:
        return Wire(self.study.up, self.study.codec.down, Layout(self.spec.sizes, self.sites), self.study.seed)


def model_header(study: Study, shape: Sequence[int], classes: Sequence[str], round: int) -> dict[str, Any]:
    """What a saved model says of itself."""
    about = {"model": study.dump()["model"], "shape": shape, "classes": classes}
    return about | {"round": round, "study": study.name, "hash": study.hash}
