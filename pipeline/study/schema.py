"""study.toml -> a frozen Study, which holds everything that a run depends on and has a hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from pipeline.aggregation.rules import AggregationRule
from pipeline.codecs.base import Codec, CodecChain
from pipeline.core.parameters import ParameterRole
from pipeline.core.registry import Component, ComponentChoice, plugin_versions
from pipeline.protocol.messages import RoundPolicy
from pipeline.protocol.tasks import Split
from pipeline.strategies.base import Strategy
from pipeline.study.privacy import PrivacyConfig

if TYPE_CHECKING:
    from models.networks.base import ModelConfig
    from sites.data.base import DataSource
    from sites.population.color_normalization import ColorNormalization
    from sites.population.feature_skew import FeatureSkew
    from sites.population.partition import Partitioner
else:  # chosen by name at load; importing these packages here would slow down every command
    ModelConfig = DataSource = ColorNormalization = Partitioner = FeatureSkew = Any

Fraction = Annotated[float, Field(ge=0, le=1)]
MetricName = Literal[
    "accuracy", "balanced_accuracy", "macro_f1", "auroc", "auprc", "loss", "positive_auroc", "positive_auprc"
]


class StudySection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SitesConfig(StudySection):
    """Simulated sites on a virtual clock, so that results do not depend on the machine.

    `speed`: steps per second. `dropout`: probability that a site is unavailable in a round. `stragglers`: fraction of the
    sampled sites that run at a random part of their speed in a round.
    """

    count: int | None = Field(None, gt=0, le=100_000)  # None: as many as the partition's key has values
    speed: PositiveFloat | tuple[PositiveFloat, ...] = 1.0
    dropout: Fraction | tuple[Fraction, ...] = 0.0
    stragglers: Fraction = 0.0


class PublicDataConfig(StudySection):
    """Examples without privacy cost: a fraction set apart before the partition, or the examples of another source."""

    fraction: Fraction = 0.0
    data: Annotated[DataSource, ComponentChoice("data")] | None = None
    warmup_epochs: NonNegativeInt = 0
    batch_size: PositiveInt | None = None  # of the warm-up; None: local.batch_size
    lr: PositiveFloat | None = None  # of the warm-up; None: local.lr


class LocalConfig(StudySection):
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: PositiveFloat = 0.01
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    lr_schedule: Literal["constant", "cosine", "exponential", "step"] = "constant"
    lr_decay: float = Field(0.99, gt=0, le=1)  # exponential: every round; step: every `lr_decay_every` rounds
    lr_decay_every: PositiveInt = 10
    batch_size: PositiveInt | Literal["all"] = 50
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    class_balance: Literal["none", "root", "full", "sample"] = "none"  # weights or samples rare classes more
    trainable: tuple[ParameterRole, ...] | None = None  # roles of the parameters that sites train; None: all

    @model_validator(mode="before")
    @classmethod
    def _require_epochs_or_steps(cls, values: Any) -> Any:
        if not isinstance(values, dict) or ("epochs" in values) != ("steps" in values):
            return values
        if "epochs" in values:
            raise ValueError("give either epochs or steps, not both")
        return values | {"epochs": 1}

    def lr_at_round(self, round: int, rounds: int) -> float:
        """Learning rate of round 1, 2, ...; the cosine schedule ends just above zero."""
        t = max(round - 1, 0)
        match self.lr_schedule:
            case "constant":
                return self.lr
            case "exponential":
                return self.lr * self.lr_decay**t
            case "step":
                return self.lr * self.lr_decay ** (t // self.lr_decay_every)
            case "cosine":
                return self.lr * (1 + math.cos(math.pi * min(t / rounds, 1))) / 2


def _as_list(value: object) -> object:
    """A single codec needs no list."""
    return [value] if isinstance(value, str | Mapping | Component) else value


CodecList = Annotated[tuple[Annotated[Codec, ComponentChoice("codecs")], ...], BeforeValidator(_as_list)]


class CompressionConfig(StudySection):
    """Codec chains of the updates (uplink; None: the strategy's default) and of the models (downlink)."""

    uplink: CodecList | None = None
    downlink: CodecList = ()


class AugmentationConfig(StudySection):
    """Random changes of training images; sites/training/augmentation.py explains the numbers."""

    flip: bool = False
    rotate: float = Field(0.0, ge=0, le=180)
    zoom: float = Field(0.0, ge=0, le=1)
    elastic: float = Field(0.0, ge=0)
    color: float = Field(0.0, ge=0, le=1)
    light: float = Field(0.0, ge=0, le=1)

    @property
    def num_tta_views(self) -> int:
        """Test-time augmentation of an exported model: 8 orientations (flips and rotations by 90 degrees) if the training augmentation covers them."""
        return 8 if self.flip and self.rotate >= 90 else 1


class ClientSamplingConfig(StudySection):
    fraction: float = Field(1.0, gt=0, le=1)


class RoundConfig(StudySection):
    """`partial_updates` 'auto': as the strategy is defined; FedAvg drops work cut short, FedProx keeps it."""

    deadline: PositiveFloat | None = None
    quorum: PositiveInt = 1
    partial_updates: Literal["auto", "drop", "keep"] = "auto"
    late_updates: Literal["drop", "keep"] = "drop"


class EvaluationConfig(StudySection):
    evaluate_at: Literal["coordinator", "sites", "both"] = "both"
    splits: tuple[Split, ...] = ("val",)  # evaluated every `every` rounds; otherwise test is read once, at the end
    every: PositiveInt = 1
    selection_metric: MetricName = "accuracy"
    patience: PositiveInt | None = None  # stop after so many evaluations without a better `val`
    target: float | None = None  # stop once the selection metric reaches this on the first split
    positive_class: str | None = None  # the class for AUROC, AUPRC and sensitivity
    target_specificity: float = Field(0.95, gt=0, lt=1)
    # at the end collect sums over the sites' `val` images, which an exported model needs
    validation_profile: bool = True


class Study(StudySection):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    rounds: PositiveInt = 10
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    trainer: Literal["auto", "sequential", "stacked", "threaded"] = "auto"
    num_threads: int | None = Field(None, gt=0, le=1024)  # of torch; None: all cores
    weighting: Literal["examples", "equal", "inverse"] = "examples"
    data: Annotated[DataSource, ComponentChoice("data")]
    sites: SitesConfig = SitesConfig()
    partition: Annotated[Partitioner, ComponentChoice("partitions")] = Field(default="iid", validate_default=True)
    feature_skew: Annotated[FeatureSkew, ComponentChoice("feature_skews")] = Field(
        default="none", validate_default=True
    )
    normalization: Annotated[ColorNormalization, ComponentChoice("normalizations")] = Field(
        default="none", validate_default=True
    )
    public: PublicDataConfig = PublicDataConfig()
    model: Annotated[ModelConfig, ComponentChoice("models")]
    local: LocalConfig = LocalConfig()
    augmentation: AugmentationConfig = AugmentationConfig()
    strategy: Annotated[Strategy, ComponentChoice("strategies")] = Field(default="fedavg", validate_default=True)
    compression: CompressionConfig = CompressionConfig()
    aggregation: Annotated[AggregationRule, ComponentChoice("aggregation_rules")] = Field(
        default="mean", validate_default=True
    )
    client_sampling: ClientSamplingConfig = ClientSamplingConfig()
    round: RoundConfig = RoundConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    privacy: PrivacyConfig = PrivacyConfig()

    @property
    def round_policy(self) -> RoundPolicy:
        config = self.round
        return RoundPolicy(
            config.deadline,
            config.quorum,
            self.strategy.partial_updates if config.partial_updates == "auto" else config.partial_updates,
            config.late_updates,
        )

    @property
    def uplink_codecs(self) -> CodecChain:
        return self.strategy.default_codec if self.compression.uplink is None else self.compression.uplink

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides the result: not of the data path, the name and the description."""
        study_dict = self.to_dict()
        study_dict["data"].pop("path", None)
        study_dict["public"].get("data", {}).pop("path", None)
        for key in ("name", "description"):
            study_dict.pop(key)
        components = [self.data, self.partition, self.feature_skew, self.normalization, self.model, self.strategy]
        components += [
            self.aggregation,
            *self.uplink_codecs,
            *self.compression.downlink,
            *([self.public.data] if self.public.data else []),
        ]
        study_dict["software"] = {"hemofed": version("hemofed"), **plugin_versions(components)}
        return hashlib.sha256(json.dumps(study_dict, sort_keys=True).encode()).hexdigest()
