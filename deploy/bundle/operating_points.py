"""Operating points: thresholds on the score of the positive class, with their error counts on labelled images.

A score is the log-odds of one class against the rest at the model's temperature. Sites report their validation images
as counts in 4,096 bins of equal width in asinh(log-odds); thresholds are lower edges of bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from models.probe.histogram_ranges import MAX_ASINH_LOG_ODDS

SAFE_SPECIFICITY, SCREENING_SPECIFICITY = 0.998, 0.98  # at 0.98 nearly every healthy slide shows more than 1 %
MAX_CURVE_POINTS = 48  # in a bundle
MIN_PROBABILITY = 1e-12
BoundedCount = Annotated[int, Field(ge=0, le=10**9)]


class OperatingPoint(BaseModel):
    """A threshold and the confusion counts of labelled images at it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    log_odds: float
    tp: BoundedCount
    fn: BoundedCount
    tn: BoundedCount
    fp: BoundedCount
    # standard deviations of sensitivity and specificity between sites, beyond chance; 0 if one site was measured
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


def bin_lower_edge(bin_index: int, num_bins: int) -> float:
    """The lower edge of a bin, as log-odds."""
    return math.sinh(bin_index / num_bins * 2 * MAX_ASINH_LOG_ODDS - MAX_ASINH_LOG_ODDS)


def compute_log_odds(probabilities: NDArray[np.float32], class_index: int) -> NDArray[np.float64]:
    """(N, C) -> (N,) of one class; sums 1 - p over the others, which avoids cancellation near 1."""
    p = probabilities.astype(np.float64)
    others = np.delete(p, class_index, 1).sum(1)
    return np.asarray(
        np.log(np.maximum(p[:, class_index], MIN_PROBABILITY)) - np.log(np.maximum(others, MIN_PROBABILITY))
    )


def bin_scores(log_odds: NDArray[np.float64], is_positive: NDArray[np.bool_], num_bins: int) -> NDArray[np.int64]:
    """(2, bins) counts of [others, class], binned as at the sites."""
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
    """Named points and the curve from (2, bins) counts of [others, class]; none if either row is empty.

    `between_site_variance`: (2, bins) variance between sites of the fraction that scores at least the bin's lower edge.
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
    """Points from strict to lenient, each at the score of one of the negatives.

    Between two of these scores, k of n negatives score higher, and new negatives would do so with an expected rate of
    (k + 1) / (n + 1); at the k-th score itself the rate is k / (n + 1), close to the counted one.
    """
    true_positives, false_positives = (
        np.cumsum(counts[::-1])[::-1] for counts in (positives, negatives)
    )  # at or above a bin's lower edge
    highest = int(np.flatnonzero(negatives)[-1]) + 1  # just above all negatives
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
    """The most lenient point with at least this specificity."""
    return [p for p in all_points if (p.specificity or 0) >= min_specificity][-1]


def _thin_curve(all_points: list[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """Reduces the curve to MAX_CURVE_POINTS, mostly strict ones, so that a bundle does not disclose single scores."""
    if len(all_points) <= MAX_CURVE_POINTS:
        return tuple(all_points)
    indices = np.unique(np.round(np.geomspace(1, len(all_points), MAX_CURVE_POINTS)).astype(int) - 1)
    return tuple(all_points[n] for n in indices)
