"""Local work as data: what a site's half of an algorithm asks a trainer to do, and what comes back."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from pipeline.core.parameters import Role, Vec

Split = Literal["train", "val", "test"]
SCORE_BINS = 1024
CALIBRATION_BINS = 15
FINE_BINS = 4096  # of a profile's scores: thresholds stand at their edges
DISTANCE_BINS = 256
MEASURE_BINS = 256
TEMPERATURES = tuple(2.0 ** (k / 8) for k in range(-24, 25))


@dataclass(frozen=True)
class Pull:
    """A data-free term of the local objective: adds `slope * w + offset` to the gradient. Pulls add."""

    slope: Vec | float = 0.0
    offset: Vec | float = 0.0

    def __add__(self, other: Pull) -> Pull:
        return Pull(self.slope + other.slope, self.offset + other.offset)

    @property
    def absent(self) -> bool:
        return (
            not isinstance(self.slope, Tensor)
            and not isinstance(self.offset, Tensor)
            and self.slope == self.offset == 0
        )


def toward(target: Vec, mu: float) -> Pull:
    """The gradient of (mu/2)|w - target|^2."""
    return Pull(mu, -mu * target) if mu else Pull()


@dataclass(frozen=True)
class Work:
    asked: int  # steps
    done: int
    examples: int  # n_k of the training split
    seconds: float = 0.0
    looks: int = 0  # steps' worth of looking at all local data (gamma), which takes time but trains nothing

    @property
    def partial(self) -> bool:
        return self.done < self.asked

    def __add__(self, other: Work) -> Work:
        """Two jobs of one turn on the same examples."""
        return replace(
            self, asked=self.asked + other.asked, done=self.done + other.done, looks=self.looks + other.looks
        )


NO_STATS = torch.zeros(0)


@dataclass(frozen=True)
class Fit:
    """Train from `start`. Either `epochs` or `steps`; optimiser state is fresh in every Fit."""

    start: Vec
    stats: Vec = field(default_factory=lambda: NO_STATS)
    steps: int | None = None
    epochs: int | None = None
    gamma: float | None = (
        None  # stop once |grad h(w)| <= gamma |grad h(start)|, checked once an epoch on all local data
    )
    pull: Pull = Pull()
    trains: frozenset[Role] | None = None  # the roles that may move; None: all
    ahead: float = 0.0  # first-order MAML: the gradient is taken a step of this rate ahead, on the batch's other half
    lr: float | None = None  # else the plan's for this turn
    data: Literal["train", "public"] = "train"  # the site's own examples, or those that nobody has to protect
    cap: int | None = None  # set by the runner from the deadline: at most so many steps
    whole: bool = False  # set by the runner: work cut short is not welcome, so do not begin what cannot be finished


@dataclass(frozen=True)
class Fitted:
    weights: Vec
    stats: Vec
    work: Work
    loss: float  # mean over the training batches seen
    travel: float | None  # sum of the learning rates over the steps done, for plain SGD, else None


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean loss over the whole training split."""

    at: Vec
    stats: Vec = field(default_factory=lambda: NO_STATS)


@dataclass(frozen=True)
class Slope:
    gradient: Vec
    work: Work
    loss: float


@dataclass(frozen=True)
class Evaluate:
    weights: Vec
    split: Split
    stats: Vec = field(default_factory=lambda: NO_STATS)


class Sums:
    """Tensors that add up: over batches, and over sites."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(self.sums().values(), other.sums().values(), strict=True)))

    def sums(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def of(cls, sums: Mapping[str, Tensor]) -> Self:
        return cls(**{name: sums[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Evaluated(Sums):
    """Sums only, so that pooled AUROC, calibration and thresholds derive from totals over sites."""

    n: Tensor  # ()
    loss: Tensor  # () sum over examples
    confusion: Tensor  # (C, C) rows are the truth
    scores: Tensor  # (C, 2, SCORE_BINS) int32: one-vs-rest scores of [others, class]
    calibration: Tensor  # (CALIBRATION_BINS, 3) count, sum of confidence, correct


@dataclass(frozen=True)
class Activate:
    """What a network's layers answer to `count` public examples: nobody's, so that they may be compared anywhere."""

    weights: Vec
    stats: Vec = field(default_factory=lambda: NO_STATS)
    count: int = 256


@dataclass(frozen=True)
class Activations:
    inputs: Tensor  # (n, d)
    layers: tuple[Tensor, ...]  # (n, p) each: the outputs of the layers with weights, normalisations left out


@dataclass(frozen=True)
class Lens:
    """How traits are measured: within each class `(traits - mean) @ whiten` has the covariance 1, about one of `centres`;
    logits are divided by `temperature`."""

    mean: Tensor  # (D,)
    whiten: Tensor  # (D, D)
    centres: Tensor  # (C, D): the classes' means, whitened
    temperature: float

    def vectors(self) -> dict[str, Tensor]:
        """As a message carries it."""
        temperature = torch.tensor(self.temperature, dtype=torch.float64)
        return {"lens/mean": self.mean, "lens/whiten": self.whiten, "lens/centres": self.centres,
                "lens/temperature": temperature}  # fmt: skip


def lens_from(vectors: Mapping[str, Tensor]) -> Lens:
    mean, whiten, centres = (vectors[f"lens/{part}"] for part in ("mean", "whiten", "centres"))
    return Lens(mean, whiten, centres, float(vectors["lens/temperature"]))


@dataclass(frozen=True)
class Profile:
    """What a network makes of a split's images, as an exported model needs it; at first without a lens."""

    weights: Vec
    split: Split = "val"
    stats: Vec = field(default_factory=lambda: NO_STATS)
    lens: Lens | None = None
    turns: int = 1  # 8: answers are means over all ways to lay an image down


@dataclass(frozen=True)
class Profiled(Sums):
    """Sums only. Without a lens temperature is 1 and there are no distances."""

    n: Tensor  # ()
    heated: Tensor  # (len(TEMPERATURES),) loss at each temperature
    first: Tensor  # (C, D) sum of the traits, by class
    second: Tensor  # (D, D) of their products
    confusion: Tensor  # (C, C) rows are the truth
    scores: Tensor  # (C, 2, FINE_BINS) as Evaluated's, at the lens's temperature
    calibration: Tensor  # (CALIBRATION_BINS, 3), likewise
    distances: Tensor  # (C, DISTANCE_BINS) images by their distance from the nearest centre, even in its logarithm
    measures: Tensor  # (measures, MEASURE_BINS) images by each measure from 0 to 1


Job = Fit | Gradient | Evaluate | Activate | Profile
Result = Fitted | Slope | Evaluated | Activations | Profiled


# `fit = yield from fitted(Fit(...))` is `fit = yield Fit(...)` with the type of what comes back.
def fitted(job: Fit) -> Generator[Job, Result, Fitted]:
    result = yield job
    assert isinstance(result, Fitted)
    return result


def slope(job: Gradient) -> Generator[Job, Result, Slope]:
    result = yield job
    assert isinstance(result, Slope)
    return result


def evaluated(job: Evaluate) -> Generator[Job, Result, Evaluated]:
    result = yield job
    assert isinstance(result, Evaluated)
    return result


def profiled(job: Profile) -> Generator[Job, Result, Profiled]:
    result = yield job
    assert isinstance(result, Profiled)
    return result
