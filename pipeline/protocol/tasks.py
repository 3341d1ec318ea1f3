"""Local work as data: what a site's half of an algorithm asks a trainer to do, and what comes back."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from pipeline.core.parameters import ParameterRole, ParamVector

Split = Literal["train", "val", "test"]
SCORE_BINS = 1024
CALIBRATION_BINS = 15
PROFILE_SCORE_BINS = 4096  # of a profile's scores: thresholds stand at their edges
DISTANCE_BINS = 256
IMAGE_MEASURE_BINS = 256
TEMPERATURES = tuple(2.0 ** (k / 8) for k in range(-24, 25))


@dataclass(frozen=True)
class LocalRegularizer:
    """A data-free term of the local objective: adds `slope * w + offset` to the gradient. Pulls add."""

    slope: ParamVector | float = 0.0
    offset: ParamVector | float = 0.0

    def __add__(self, other: LocalRegularizer) -> LocalRegularizer:
        return LocalRegularizer(self.slope + other.slope, self.offset + other.offset)

    @property
    def is_zero(self) -> bool:
        return (
            not isinstance(self.slope, Tensor)
            and not isinstance(self.offset, Tensor)
            and self.slope == self.offset == 0
        )


def proximal_term(target: ParamVector, mu: float) -> LocalRegularizer:
    """The gradient of (mu/2)|w - target|^2."""
    return LocalRegularizer(mu, -mu * target) if mu else LocalRegularizer()


@dataclass(frozen=True)
class LocalWork:
    steps_requested: int  # steps
    steps_done: int
    num_examples: int  # n_k of the training split
    seconds: float = 0.0
    eval_steps: int = 0  # steps' worth of looking at all local data (gamma), which takes time but trains nothing

    @property
    def is_partial(self) -> bool:
        return self.steps_done < self.steps_requested

    def __add__(self, other: LocalWork) -> LocalWork:
        """Two jobs of one turn on the same examples."""
        return replace(
            self,
            steps_requested=self.steps_requested + other.steps_requested,
            steps_done=self.steps_done + other.steps_done,
            eval_steps=self.eval_steps + other.eval_steps,
        )


NO_NORM_STATS = torch.zeros(0)


@dataclass(frozen=True)
class TrainJob:
    """Train from `start`. Either `epochs` or `steps`; optimiser state is fresh in every Fit."""

    initial_weights: ParamVector
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)
    steps: int | None = None
    epochs: int | None = None
    inexactness: float | None = (
        None  # stop once |grad h(w)| <= gamma |grad h(start)|, checked once an epoch on all local data
    )
    regularizer: LocalRegularizer = LocalRegularizer()
    trainable_roles: frozenset[ParameterRole] | None = None  # the roles that may move; None: all
    maml_lr: float = 0.0  # first-order MAML: the gradient is taken a step of this rate ahead, on the batch's other half
    lr: float | None = None  # else the plan's for this turn
    dataset: Literal["train", "public"] = "train"  # the site's own examples, or those that nobody has to protect
    max_steps: int | None = None  # set by the runner from the deadline: at most so many steps
    all_or_nothing: bool = (
        False  # set by the runner: work cut short is not welcome, so do not begin what cannot be finished
    )


@dataclass(frozen=True)
class TrainResult:
    weights: ParamVector
    norm_stats: ParamVector
    work: LocalWork
    loss: float  # mean over the training batches seen
    lr_sum: float | None  # sum of the learning rates over the steps done, for plain SGD, else None


@dataclass(frozen=True)
class GradientJob:
    """The gradient of the mean loss over the whole training split."""

    weights: ParamVector
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)


@dataclass(frozen=True)
class GradientResult:
    gradient: ParamVector
    work: LocalWork
    loss: float


@dataclass(frozen=True)
class EvaluateJob:
    weights: ParamVector
    split: Split
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)


class SummableTensors:
    """Tensors that add up: over batches, and over sites."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(self.to_dict().values(), other.to_dict().values(), strict=True)))

    def to_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(**{name: tensors[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class EvaluationSums(SummableTensors):
    """Sums only, so that pooled AUROC, calibration and thresholds derive from totals over sites."""

    n: Tensor  # ()
    loss: Tensor  # () sum over examples
    confusion: Tensor  # (C, C) rows are the truth
    scores: Tensor  # (C, 2, SCORE_BINS) int32: one-vs-rest scores of [others, class]
    calibration: Tensor  # (CALIBRATION_BINS, 3) count, sum of confidence, correct


@dataclass(frozen=True)
class ActivationsJob:
    """What a network's layers answer to `count` public examples: nobody's, so that they may be compared anywhere."""

    weights: ParamVector
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)
    num_examples: int = 256


@dataclass(frozen=True)
class ActivationsResult:
    inputs: Tensor  # (n, d)
    layers: tuple[Tensor, ...]  # (n, p) each: the outputs of the layers with weights, normalisations left out


@dataclass(frozen=True)
class FeatureWhitening:
    """How traits are measured: within each class `(traits - mean) @ whiten` has the covariance 1, about one of `centres`;
    logits are divided by `temperature`."""

    mean: Tensor  # (D,)
    whitening: Tensor  # (D, D)
    class_centers: Tensor  # (C, D): the classes' means, whitened
    temperature: float

    def to_dict(self) -> dict[str, Tensor]:
        """As a message carries it."""
        temperature = torch.tensor(self.temperature, dtype=torch.float64)
        return {
            "lens/mean": self.mean,
            "lens/whiten": self.whitening,
            "lens/centres": self.class_centers,
            "lens/temperature": temperature,
        }


def whitening_from_dict(vectors: Mapping[str, Tensor]) -> FeatureWhitening:
    mean, whitening, class_centers = (vectors[f"lens/{part}"] for part in ("mean", "whiten", "centres"))
    return FeatureWhitening(mean, whitening, class_centers, float(vectors["lens/temperature"]))


@dataclass(frozen=True)
class ProfileJob:
    """What a network makes of a split's images, as an exported model needs it; at first without a lens."""

    weights: ParamVector
    split: Split = "val"
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)
    whitening: FeatureWhitening | None = None
    num_tta_views: int = 1  # 8: answers are means over all ways to lay an image down


@dataclass(frozen=True)
class ProfileSums(SummableTensors):
    """Sums only. Without a lens temperature is 1 and there are no distances."""

    n: Tensor  # ()
    nll_by_temperature: Tensor  # (len(TEMPERATURES),) loss at each temperature
    feature_sums: Tensor  # (C, D) sum of the traits, by class
    feature_product_sums: Tensor  # (D, D) of their products
    confusion: Tensor  # (C, C) rows are the truth
    scores: Tensor  # (C, 2, FINE_BINS) as Evaluated's, at the lens's temperature
    calibration: Tensor  # (CALIBRATION_BINS, 3), likewise
    distances: Tensor  # (C, DISTANCE_BINS) images by their distance from the nearest centre, even in its logarithm
    image_measures: Tensor  # (measures, MEASURE_BINS) images by each measure from 0 to 1


LocalJob = TrainJob | GradientJob | EvaluateJob | ActivationsJob | ProfileJob
JobResult = TrainResult | GradientResult | EvaluationSums | ActivationsResult | ProfileSums


# `fit = yield from fitted(Fit(...))` is `fit = yield Fit(...)` with the type of what comes back.
def run_training(job: TrainJob) -> Generator[LocalJob, JobResult, TrainResult]:
    result = yield job
    assert isinstance(result, TrainResult)
    return result


def run_gradient(job: GradientJob) -> Generator[LocalJob, JobResult, GradientResult]:
    result = yield job
    assert isinstance(result, GradientResult)
    return result


def run_evaluation(job: EvaluateJob) -> Generator[LocalJob, JobResult, EvaluationSums]:
    result = yield job
    assert isinstance(result, EvaluationSums)
    return result


def run_profile(job: ProfileJob) -> Generator[LocalJob, JobResult, ProfileSums]:
    result = yield job
    assert isinstance(result, ProfileSums)
    return result
