"""study.toml -> a frozen Study. Everything a run depends on is in it; its hash names the plan."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
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

from pipeline.aggregation.rules import Combine
from pipeline.codecs.base import Chain, Codec
from pipeline.core.errors import BadStudy
from pipeline.core.parameters import Role
from pipeline.core.registry import Choice, Component, plugin_versions
from pipeline.protocol.messages import Wait
from pipeline.protocol.tasks import Split
from pipeline.strategies.base import Strategy
from pipeline.study.privacy import Privacy

if TYPE_CHECKING:
    from models.networks.base import Model
    from sites.data.base import Source
    from sites.population.color_normalization import Normalise
    from sites.population.feature_skew import Skew
    from sites.population.partition import Partition
else:  # chosen by name at load; importing the rooms here would make every command pay for them
    Model = Source = Normalise = Partition = Skew = Any

Share = Annotated[float, Field(ge=0, le=1)]
Metric = Literal[
    "accuracy", "balanced_accuracy", "macro_f1", "auroc", "auprc", "loss", "positive_auroc", "positive_auprc"
]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Sites(Section):
    """`speed` (steps a second), `dropout` (chance to vanish in a round) and `stragglers` (share of the asked sites that
    is slowed to a random part of its speed each round) live on a virtual clock, so results do not depend on the machine."""

    count: int | None = Field(None, gt=0, le=100_000)  # may be left out where a natural key says
    speed: PositiveFloat | tuple[PositiveFloat, ...] = 1.0
    dropout: Share | tuple[Share, ...] = 0.0
    stragglers: Share = 0.0


class Public(Section):
    """Examples that nobody has to protect: a share set apart before sites get theirs, or another source's."""

    share: Share = 0.0
    data: Annotated[Source, Choice("data")] | None = None
    warmup_epochs: NonNegativeInt = 0
    batch: PositiveInt | None = None  # of the warm-up; local.batch if not given
    lr: PositiveFloat | None = None  # likewise


class Local(Section):
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: PositiveFloat = 0.01
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "exponential", "step"] = "constant"
    decay: float = Field(0.99, gt=0, le=1)  # exponential: every round; step: every `every` rounds
    every: PositiveInt = 10
    batch: PositiveInt | Literal["all"] = 50
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    balance: Literal["none", "root", "full", "sample"] = "none"  # rare classes count, or are drawn, more often
    trains: tuple[Role, ...] | None = None  # the parts that sites may move; all if not given

    @model_validator(mode="before")
    @classmethod
    def _one_measure(cls, given: Any) -> Any:
        if not isinstance(given, dict) or ("epochs" in given) != ("steps" in given):
            return given
        if "epochs" in given:
            raise ValueError("give either epochs or steps, not both")
        return given | {"epochs": 1}

    def rate(self, round: int, rounds: int) -> float:
        """Of rounds 1, 2, ...; cosine ends just above zero in the last."""
        t = max(round - 1, 0)
        match self.schedule:
            case "constant":
                return self.lr
            case "exponential":
                return self.lr * self.decay**t
            case "step":
                return self.lr * self.decay ** (t // self.every)
            case "cosine":
                return self.lr * (1 + math.cos(math.pi * min(t / rounds, 1))) / 2


def _listed(value: object) -> object:
    """One codec may stand alone."""
    return [value] if isinstance(value, str | Mapping | Component) else value


Codecs = Annotated[tuple[Annotated[Codec, Choice("codecs")], ...], BeforeValidator(_listed)]


class Travel(Section):
    """What updates go up in and models down in: a codec, or several one after the other. `up`: else the strategy's own."""

    up: Codecs | None = None
    down: Codecs = ()


class Augment(Section):
    """Of training images alone; what each number means is in sites/training/augmentation.py."""

    flip: bool = False
    rotate: float = Field(0.0, ge=0, le=180)
    zoom: float = Field(0.0, ge=0, le=1)
    elastic: float = Field(0.0, ge=0)
    colour: float = Field(0.0, ge=0, le=1)
    light: float = Field(0.0, ge=0, le=1)

    @property
    def views(self) -> int:
        """How an exported model looks at an image: eight ways round where the study says that there is no upright."""
        return 8 if self.flip and self.rotate >= 90 else 1


class Selection(Section):
    fraction: float = Field(1.0, gt=0, le=1)


class Waiting(Section):
    """`auto`: as the strategy is defined: FedAvg drops work cut short, FedProx keeps it."""

    deadline: PositiveFloat | None = None
    quorum: PositiveInt = 1
    partial: Literal["auto", "drop", "keep"] = "auto"
    late: Literal["drop", "keep"] = "drop"


class Evaluation(Section):
    where: Literal["coordinator", "sites", "both"] = "both"
    watch: tuple[Split, ...] = ("val",)  # looked at every `every` rounds; test is otherwise read once, at the end
    every: PositiveInt = 1
    best: Metric = "accuracy"
    patience: PositiveInt | None = None  # stop after so many looks without a better `val`
    target: float | None = None  # stop once the best metric reaches this on the first watched split
    positive: str | None = None  # the class whose AUROC and sensitivity matter
    specificity: float = Field(0.95, gt=0, lt=1)
    profile: bool = True  # at the end sites describe their `val` images in sums, which an exported model needs


class Study(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    about: str = ""
    seed: int = Field(0, ge=0, lt=2**63)
    rounds: PositiveInt = 10
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    trainer: Literal["auto", "loop", "stacked", "pool"] = "auto"
    threads: int | None = Field(None, gt=0, le=1024)  # for torch; all cores if not given
    weighting: Literal["examples", "equal", "inverse"] = "examples"
    data: Annotated[Source, Choice("data")]
    sites: Sites = Sites()
    partition: Annotated[Partition, Choice("partitions")] = Field(default="iid", validate_default=True)
    skew: Annotated[Skew, Choice("skews")] = Field(default="none", validate_default=True)
    normalise: Annotated[Normalise, Choice("normalisers")] = Field(default="none", validate_default=True)
    public: Public = Public()
    model: Annotated[Model, Choice("models")]
    local: Local = Local()
    augment: Augment = Augment()
    strategy: Annotated[Strategy, Choice("strategies")] = Field(default="fedavg", validate_default=True)
    codec: Travel = Travel()
    combine: Annotated[Combine, Choice("combines")] = Field(default="mean", validate_default=True)
    selection: Selection = Selection()
    waiting: Waiting = Waiting()
    evaluation: Evaluation = Evaluation()
    privacy: Privacy = Privacy()

    @property
    def wait(self) -> Wait:
        w = self.waiting
        return Wait(w.deadline, w.quorum, self.strategy.partial if w.partial == "auto" else w.partial, w.late)

    @property
    def up(self) -> Chain:
        return self.strategy.codec if self.codec.up is None else self.codec.up

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def hash(self) -> str:
        """Of everything that decides the result: not where data lie, and not what the study is called."""
        plan = self.dump()
        plan["data"].pop("path", None)
        plan["public"].get("data", {}).pop("path", None)
        for key in ("name", "about"):
            plan.pop(key)
        parts = [self.data, self.partition, self.skew, self.normalise, self.model, self.strategy]
        parts += [self.combine, *self.up, *self.codec.down, *([self.public.data] if self.public.data else [])]
        plan["software"] = {"hemofed": version("hemofed"), **plugin_versions(parts)}
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def load_study(path: Path, overrides: Mapping[str, Any] | None = None) -> Study:
    """A relative data.path starts from the study file, one given as an override from here; a run keeps it absolute."""
    from pipeline.study.toml_file import read_study

    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadStudy(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    study = read_study(text, str(path), overrides or {})

    def base(section: str) -> Path:
        return Path.cwd() if {section, f"{section}.path"} & set(overrides or {}) else path.parent

    public = study.public.model_copy(update={"data": _placed(study.public.data, base("public.data"))})
    return study.model_copy(update={"data": _placed(study.data, base("data")), "public": public})


def _placed(source: Source | None, base: Path) -> Source | None:
    if source is None or source.path is None or source.path.is_absolute():
        return source
    return source.model_copy(update={"path": (base / source.path).resolve()})
