"""Local jobs as data: what a client's half of an algorithm asks a trainer to do, and the results."""

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
PROFILE_SCORE_BINS = 4096  # of a profile's scores; thresholds are bin edges
DISTANCE_BINS = 256
IMAGE_MEASURE_BINS = 256
TEMPERATURES = tuple(2.0 ** (k / 8) for k in range(-24, 25))


@dataclass(frozen=True)
class LocalRegularizer:
    """A data-free term of the local objective. In every step it adds `slope * w + offset` to the gradient, not to the loss.

    Either may be a number or a vector, and both default to 0: a linear term -<h, w> is `LocalRegularizer(offset=-h)`.
    Regularizers can be added.
    """

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
    """The gradient of (mu/2)|w - target|^2; with mu = 0 the empty regularizer."""
    return LocalRegularizer(mu, -mu * target) if mu else LocalRegularizer()


@dataclass(frozen=True)
class LocalWork:
    """How much a client worked in a round. The aggregation weights and the record of the round follow from it."""

    steps_requested: int
    steps_done: int  # fewer, if the deadline cut the work short
    num_examples: int  # n_k, of the training split
    seconds: float = 0.0
    eval_steps: int = 0  # cost of evaluating the full local gradient (gamma-inexactness), in steps

    @property
    def is_partial(self) -> bool:
        return self.steps_done < self.steps_requested

    def __add__(self, other: LocalWork) -> LocalWork:
        """Two jobs of one round on the same examples."""
        return replace(
            self,
            steps_requested=self.steps_requested + other.steps_requested,
            steps_done=self.steps_done + other.steps_done,
            eval_steps=self.eval_steps + other.eval_steps,
        )


NO_NORM_STATS = torch.zeros(0)


@dataclass(frozen=True)
class TrainJob:
    """Train from `initial_weights` for `epochs` or `steps`. Every job starts with a new optimizer state.

    inexactness: stop once |grad h(w)| <= gamma |grad h(initial)|, checked after every epoch on all local data.
    maml_lr: first-order MAML; the gradient is taken one step of this rate ahead, on the other half of the batch.
    max_steps, all_or_nothing: set by the task session from the deadline; with all_or_nothing a job that cannot finish does not
    begin, because the coordinator does not accept partial work.
    """

    initial_weights: ParamVector
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)
    steps: int | None = None
    epochs: int | None = None
    inexactness: float | None = None  # gamma
    regularizer: LocalRegularizer = LocalRegularizer()
    trainable_roles: frozenset[ParameterRole] | None = None  # the roles that are trained; None: all
    maml_lr: float = 0.0
    lr: float | None = None  # None: the round's learning rate
    dataset: Literal["train", "public"] = "train"  # the site's own examples, or the public ones
    max_steps: int | None = None
    all_or_nothing: bool = False


@dataclass(frozen=True)
class TrainResult:
    """What a `TrainJob` ends with: the trained model, and how much was done."""

    weights: ParamVector
    norm_stats: ParamVector
    work: LocalWork
    loss: float  # mean over the training batches
    lr_sum: float | None  # sum of the learning rates over the steps done, for plain SGD, else None


@dataclass(frozen=True)
class GradientJob:
    """The gradient of the mean loss over all training examples."""

    weights: ParamVector
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)


@dataclass(frozen=True)
class GradientResult:
    """The full-batch gradient of a `GradientJob`, and its mean loss."""

    gradient: ParamVector
    work: LocalWork
    loss: float


@dataclass(frozen=True)
class EvaluateJob:
    """The evaluation sums of a model on one split."""

    weights: ParamVector
    split: Split
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)


class SummableTensors:
    """Tensors that are summed over batches and over sites."""

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
    """Sums only, so that pooled AUROC, calibration and thresholds follow from sums over sites."""

    n: Tensor  # ()
    loss: Tensor  # () sum over examples
    confusion: Tensor  # (C, C) rows are the truth
    scores: Tensor  # (C, 2, SCORE_BINS) int32: one-vs-rest scores of [others, class]
    calibration: Tensor  # (CALIBRATION_BINS, 3) count, sum of confidence, correct


@dataclass(frozen=True)
class ActivationsJob:
    """The activations of a network's layers on `num_examples` public examples, for the coordinator to compare networks."""

    weights: ParamVector
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)
    num_examples: int = 256


@dataclass(frozen=True)
class ActivationsResult:
    inputs: Tensor  # (n, d)
    layers: tuple[Tensor, ...]  # (n, p) each: the outputs of the layers with weights, without normalization layers


@dataclass(frozen=True)
class FeatureWhitening:
    """Within each class `(features - mean) @ whitening` has the covariance 1 around one of `class_centers`; logits are
    divided by `temperature`."""

    mean: Tensor  # (D,)
    whitening: Tensor  # (D, D)
    class_centers: Tensor  # (C, D): the classes' means, whitened
    temperature: float

    def to_dict(self) -> dict[str, Tensor]:
        """As named tensors of a message."""
        temperature = torch.tensor(self.temperature, dtype=torch.float64)
        return {
            "whitening/mean": self.mean,
            "whitening/matrix": self.whitening,
            "whitening/class_centers": self.class_centers,
            "whitening/temperature": temperature,
        }


def whitening_from_dict(vectors: Mapping[str, Tensor]) -> FeatureWhitening:
    mean, whitening, class_centers = (vectors[f"whitening/{part}"] for part in ("mean", "matrix", "class_centers"))
    return FeatureWhitening(mean, whitening, class_centers, float(vectors["whitening/temperature"]))


@dataclass(frozen=True)
class ProfileJob:
    """Statistics of a network's outputs on a split, for an exported model; the first pass runs without whitening."""

    weights: ParamVector
    split: Split = "val"
    norm_stats: ParamVector = field(default_factory=lambda: NO_NORM_STATS)
    whitening: FeatureWhitening | None = None
    num_tta_views: int = 1  # 8: outputs are means over the rotations and flips of an image


@dataclass(frozen=True)
class ProfileSums(SummableTensors):
    """Sums only. Without whitening the temperature is 1 and there are no distances."""

    n: Tensor  # ()
    nll_by_temperature: Tensor  # (len(TEMPERATURES),) loss at each temperature
    feature_sums: Tensor  # (C, D) sums of the features, by class
    feature_product_sums: Tensor  # (D, D) of their products
    confusion: Tensor  # (C, C) rows are the truth
    scores: Tensor  # (C, 2, PROFILE_SCORE_BINS) as in EvaluationSums, at the temperature
    calibration: Tensor  # (CALIBRATION_BINS, 3) likewise
    distances: Tensor  # (C, DISTANCE_BINS) images by the distance to the nearest center, logarithmic bins
    image_measures: Tensor  # (measures, IMAGE_MEASURE_BINS) images by each measure from 0 to 1


LocalJob = TrainJob | GradientJob | EvaluateJob | ActivationsJob | ProfileJob
JobResult = TrainResult | GradientResult | EvaluationSums | ActivationsResult | ProfileSums


def run_training(job: TrainJob) -> Generator[LocalJob, JobResult, TrainResult]:
    """`result = yield from run_training(job)` is `result = yield job` with the type of the result."""
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
