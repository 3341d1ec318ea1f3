"""Local work as data: what a site's half of an algorithm asks a trainer to do, and what comes back."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from pipeline.weights import Role, Vec

Split = Literal["train", "val", "test"]
SCORE_BINS = 1024
CALIBRATION_BINS = 15


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


@dataclass(frozen=True)
class Evaluated:
    """Sums only, so that pooled AUROC, calibration and thresholds derive from totals over sites."""

    n: Tensor  # ()
    loss: Tensor  # () sum over examples
    confusion: Tensor  # (C, C) rows are the truth
    scores: Tensor  # (C, 2, SCORE_BINS) int32: one-vs-rest scores of [others, class]
    calibration: Tensor  # (CALIBRATION_BINS, 3) count, sum of confidence, correct

    def __add__(self, other: Evaluated) -> Evaluated:
        return Evaluated(*(a + b for a, b in zip(self.sums().values(), other.sums().values(), strict=True)))

    def sums(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def of(cls, sums: Mapping[str, Tensor]) -> Evaluated:
        return cls(**{name: sums[name] for name in cls.__dataclass_fields__})


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


Job = Fit | Gradient | Evaluate | Activate
Result = Fitted | Slope | Evaluated | Activations


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
