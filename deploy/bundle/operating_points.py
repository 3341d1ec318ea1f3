"""Operating points: at which score a cell is called positive, and how often that was right on images with labels.

Scores are log-odds of one class against the rest at the model's temperature. Sites told how many of their validation
images fall into which of 4,096 bins of them, even in asinh(log-odds); thresholds are bins' lower edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from pipeline.core.errors import StudyError

MAX_ASINH_LOG_ODDS = 10.0  # as sites/training/evaluation.py bins scores
SAFE_SPECIFICITY, SCREENING_SPECIFICITY = (
    0.998,
    0.98,
)  # specificities; at 0.98 nearly every healthy slide passes the line of 1 %
MAX_CURVE_POINTS = 48  # points of the curve that a bundle tells
MIN_PROBABILITY = 1e-12
BoundedCount = Annotated[int, Field(ge=0, le=10**9)]


class OperatingPoint(BaseModel):
    """A threshold and what came of it: counts of labelled images."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    log_odds: float
    tp: BoundedCount
    fn: BoundedCount
    tn: BoundedCount
    fp: BoundedCount
    # standard deviations of sensitivity and specificity between sites, beyond chance; 0 where one place was measured
    sensitivity_spread: float = Field(default=0.0, ge=0, le=1)
    specificity_spread: float = Field(default=0.0, ge=0, le=1)

    @property
    def probability(self) -> float:
        return 1 / (1 + math.exp(-self.log_odds)) if self.log_odds > -700 else 0.0

    @property
    def sensitivity(self) -> float | None:
        return self.tp / (self.tp + self.fn) if self.tp + self.fn else None

    @property
    def specificity(self) -> float | None:
        return self.tn / (self.tn + self.fp) if self.tn + self.fp else None

    def to_dict(self) -> dict[str, float | int | str | None]:
        return {
            **self.model_dump(),
            "probability": self.probability,
            "sensitivity": self.sensitivity,
            "specificity": self.specificity,
        }


class ModelCalibration(BaseModel):
    """How probabilities and decisions follow from a model's answers; a lab may have its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(gt=1e-3, lt=1e3)
    positive_class: str | None
    operating_points: tuple[OperatingPoint, ...]  # named ones, the first is the default
    curve: tuple[OperatingPoint, ...] = ()  # from strict to lenient
    measured_on: str  # in words
    loss: float | None = None  # mean, at the temperature
    loss_before: float | None = None  # at temperature 1

    def find_point(self, name: str | None = None) -> OperatingPoint | None:
        if name is None:
            return self.operating_points[0] if self.operating_points else None
        return next((p for p in self.operating_points if p.name == name), None)

    @property
    def sorted_points(self) -> list[OperatingPoint]:
        """All that a slider can stand at, from strict to lenient: the curve is thinned and need not hold the named ones."""
        points_by_log_odds = {p.log_odds: p for p in (*self.curve, *reversed(self.operating_points))}
        return sorted(points_by_log_odds.values(), key=lambda p: -p.log_odds)

    def point_at_probability(self, probability: float) -> OperatingPoint:
        """The measured point with the threshold next above a probability."""
        min_log_odds = math.log(max(probability, MIN_PROBABILITY) / max(1 - probability, MIN_PROBABILITY))
        above = [p for p in self.sorted_points if p.log_odds >= min_log_odds - 1e-9]
        if not above:
            highest = self.sorted_points[0].probability if self.sorted_points else 0.0
            raise StudyError(
                f"nothing was measured at a probability of {probability:g} or above; the highest is {highest:.4f}"
            )
        return above[-1]


def bin_lower_edge(bin_index: int, num_bins: int) -> float:
    """The lower edge of a bin, as log-odds."""
    return math.sinh(bin_index / num_bins * 2 * MAX_ASINH_LOG_ODDS - MAX_ASINH_LOG_ODDS)


def compute_log_odds(probabilities: NDArray[np.float32], class_index: int) -> NDArray[np.float64]:
    """(N, C) -> (N,) of one class; 1 - p is summed over the others, so that it does not cancel near 1."""
    p = probabilities.astype(np.float64)
    others = np.delete(p, class_index, 1).sum(1)
    return np.asarray(
        np.log(np.maximum(p[:, class_index], MIN_PROBABILITY)) - np.log(np.maximum(others, MIN_PROBABILITY))
    )


def rescale_temperature(probabilities: NDArray[np.float32], ratio: float) -> NDArray[np.float32]:
    """(N, C) as they would be at another temperature: logits times `ratio`."""
    if ratio == 1:
        return probabilities
    logits = np.log(np.maximum(probabilities.astype(np.float64), 1e-30)) * ratio
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(1, keepdims=True), np.float32)


def bin_scores(log_odds: NDArray[np.float64], is_positive: NDArray[np.bool_], num_bins: int) -> NDArray[np.int64]:
    """(2, bins) counts of [others, class], as sites make them."""
    bin_indices = (
        ((np.arcsinh(log_odds) + MAX_ASINH_LOG_ODDS) / (2 * MAX_ASINH_LOG_ODDS) * num_bins)
        .astype(np.int64)
        .clip(0, num_bins - 1)
    )
    return np.stack(
        [np.bincount(bin_indices[is_positive == class_flag], minlength=num_bins) for class_flag in (False, True)]
    )


def build_operating_points(
    scores: NDArray[np.int64], between_site_variance: NDArray[np.float64] | None = None
) -> tuple[tuple[OperatingPoint, ...], tuple[OperatingPoint, ...]]:
    """Named points and the curve, from (2, bins) counts of [others, class]; none where one of both is missing.

    `between`: variances between sites of the shares that score at least so much, alike in shape.
    """
    negatives, positives = scores
    if not positives.sum() or not negatives.sum():
        return (), ()
    all_points = list(
        _iter_points(
            positives,
            negatives,
            np.sqrt(np.zeros(scores.shape) if between_site_variance is None else between_site_variance),
        )
    )
    safe, screen = (
        _most_lenient_point(all_points, SAFE_SPECIFICITY),
        _most_lenient_point(all_points, SCREENING_SPECIFICITY),
    )
    balanced = max(all_points, key=lambda p: (p.sensitivity or 0) + (p.specificity or 0))
    named = [(safe, "safe"), (screen, "screening"), (balanced, "even")]
    return tuple(point.model_copy(update={"name": name}) for point, name in named), _thin_curve(all_points)


def _iter_points(
    positives: NDArray[np.int64], negatives: NDArray[np.int64], spread: NDArray[np.float64]
) -> Iterator[OperatingPoint]:
    """From strict to lenient, each at the score of one of the others.

    Were they between two of these, so that k of n others score higher, then of others to come (k + 1) / (n + 1) would on
    average; at the k-th score itself it is k / (n + 1), as counted.
    """
    true_positives, false_positives = (
        np.cumsum(counts[::-1])[::-1] for counts in (positives, negatives)
    )  # at a bin's lower edge or above
    highest = int(np.flatnonzero(negatives)[-1]) + 1  # just above all of them
    for bin_index in (highest, *(int(index) for index in reversed(np.flatnonzero(negatives)))):
        tp, fp = (
            int(counts[bin_index]) if bin_index < len(positives) else 0 for counts in (true_positives, false_positives)
        )
        spreads = [float(spread[row, bin_index]) if bin_index < len(positives) else 0.0 for row in (0, 1)]
        yield OperatingPoint(
            name="",
            log_odds=bin_lower_edge(bin_index, len(positives)),
            tp=tp,
            fn=int(positives.sum()) - tp,
            tn=int(negatives.sum()) - fp,
            fp=fp,
            specificity_spread=spreads[0],
            sensitivity_spread=spreads[1],
        )


def _most_lenient_point(all_points: list[OperatingPoint], min_specificity: float) -> OperatingPoint:
    """The most lenient that keeps it."""
    return [p for p in all_points if (p.specificity or 0) >= min_specificity][-1]


def _thin_curve(all_points: list[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """A bundle goes to everybody: some dozens of points, not one an image. Strict ones matter most."""
    if len(all_points) <= MAX_CURVE_POINTS:
        return tuple(all_points)
    indices = np.unique(np.round(np.geomspace(1, len(all_points), MAX_CURVE_POINTS)).astype(int) - 1)
    return tuple(all_points[n] for n in indices)
