"""Out-of-distribution guard: rejects images of poor quality, or with features unlike those of the validation images."""

from __future__ import annotations

import math
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from models.probe.feature_names import NEUTRAL_MEASURES, QUALITY_MEASURES
from models.probe.histogram_ranges import MAX_LOG2_DISTANCE, MIN_LOG2_DISTANCE

OUT_OF_DISTRIBUTION = "out of distribution"
DISTANCE_FALSE_ALARM_RATE = 0.005  # fraction of a class's validation images that the distance limit may reject
MEASURE_FALSE_ALARM_RATE = 0.001  # fraction of all validation images that each limit of each measure may reject
LIMIT_MARGIN = 4 / 3  # widens the limits of measures: they vary by slide, and validation covers few slides
MIN_SAMPLES = 20  # images of a class needed for a distance limit, cells of a slide needed for its drift
MAX_DRIFT = 1.0  # a slide's mean is farther out than the images of the study's sites


class OodReference(BaseModel):
    """Statistics of the validation images, from sums over sites, and the guard's own error rates."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_images: int = Field(ge=0, le=10**9)
    class_centers: tuple[tuple[float, ...], ...] = Field(min_length=1)  # (C, D) in whitened features
    feature_mean: tuple[float, ...]  # (D,) of all images; the drift of a slide is measured from here
    max_distance: float = Field(gt=0)  # from the nearest center
    quality_limits: dict[str, tuple[float, float]]  # by measure: lowest and highest accepted value
    quality_moments: dict[str, tuple[float, float]] = Field(default_factory=dict)  # mean and standard deviation
    false_alarm_rate: float = Field(ge=0, le=1)  # upper bound of the fraction of validation images rejected
    # by corruption: the fraction of such images rejected
    detection_rates: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _validate_consistency(self) -> Self:
        if self.quality_limits.keys() != QUALITY_MEASURES.keys() or any(
            low >= high for low, high in self.quality_limits.values()
        ):
            raise ValueError("quality_limits must have a lower and a higher number for each measure")
        if len({len(self.feature_mean), *map(len, self.class_centers)}) != 1:
            raise ValueError("feature_mean and each of class_centers must have the same length")
        return self

    def rejection_reasons(
        self, features: NDArray[np.float32], quality_measures: NDArray[np.float32]
    ) -> list[str | None]:
        """(N, D) whitened features, (N, Q) quality measures -> why each image is rejected, or None."""
        reasons: list[list[str]] = [[] for _ in features]
        for column, name in enumerate(QUALITY_MEASURES):
            low, high = self.quality_limits[name]
            for row in np.flatnonzero(~(quality_measures[:, column] >= low)):
                reasons[row].append(QUALITY_MEASURES[name][0])
            for row in np.flatnonzero(quality_measures[:, column] > high):
                reasons[row].append(QUALITY_MEASURES[name][1])
        for row in np.flatnonzero(~(self.nearest_center_distances(features) <= self.max_distance)):
            reasons[row].append("its features are foreign")
        return [f"{OUT_OF_DISTRIBUTION}: {', '.join(row_reasons)}" if row_reasons else None for row_reasons in reasons]

    def nearest_center_distances(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Root mean square distance from the nearest center: about 1 for images like the validation images."""
        centers = np.array(self.class_centers, np.float64)
        squared_distances = np.square(features.astype(np.float64)[:, None] - centers).mean(2)  # (N, C)
        return np.asarray(np.sqrt(squared_distances.min(1)))

    def compute_drift(self, features: NDArray[np.float32]) -> float | None:
        """Distance of a slide's mean from `feature_mean`, about 1 at most for the study's sites; None for too few cells."""
        if len(features) < MIN_SAMPLES:
            return None
        return self.drift_of_mean(features.mean(0, dtype=np.float64))

    def drift_of_mean(self, mean: NDArray[np.float64]) -> float:
        return float(np.sqrt(np.mean(np.square(mean - np.array(self.feature_mean)))))


def build_ood_reference(
    num_images: int,
    class_centers: NDArray[np.float64],
    distance_counts: NDArray[np.int64],
    measure_counts: NDArray[np.int64],
) -> OodReference:
    """Sets the limits from (C, D) centers, (C, bins) counts by distance and (Q, bins) counts by measure."""
    num_bins, num_features = distance_counts.shape[1], class_centers.shape[1]
    # the largest limit of all classes, so that a rare class is not rejected
    bin_index = max(
        _upper_bin(row, DISTANCE_FALSE_ALARM_RATE)
        for row in (
            distance_counts
            if not any(_has_min_samples(distance_counts))
            else distance_counts[_has_min_samples(distance_counts)]
        )
    )
    max_distance = 2 ** (MIN_LOG2_DISTANCE + (bin_index + 1) / num_bins * (MAX_LOG2_DISTANCE - MIN_LOG2_DISTANCE))
    # centers and whitening were fitted to these images, so new ones are farther out: leave-one-out, by leverage
    leverage = min(0.5, max_distance**2 * num_features / max(num_images, 1))
    limits, moments = {}, {}
    num_false_alarms = float(distance_counts[:, bin_index + 1 :].sum())
    for name, row in zip(QUALITY_MEASURES, measure_counts, strict=True):
        grid = (np.arange(len(row)) + 0.5) / len(row)
        low, high = (
            len(row) - 1 - _upper_bin(row[::-1], MEASURE_FALSE_ALARM_RATE),
            _upper_bin(row, MEASURE_FALSE_ALARM_RATE) + 1,
        )
        limits[name] = (_extend_limit(low / len(row), name, -1), _extend_limit(high / len(row), name, 1))
        mean = float(grid @ row / max(row.sum(), 1))
        moments[name] = (mean, math.sqrt(max(0.0, float(grid**2 @ row / max(row.sum(), 1)) - mean**2)))
        num_false_alarms += float(row[(grid < limits[name][0]) | (grid > limits[name][1])].sum())
    return OodReference(
        num_images=num_images,
        class_centers=class_centers.tolist(),
        feature_mean=(0.0,) * num_features,
        max_distance=max_distance / (1 - leverage),
        quality_limits=limits,
        quality_moments=moments,
        false_alarm_rate=min(1.0, num_false_alarms / max(num_images, 1)),
    )


def _has_min_samples(distance_counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray(distance_counts.sum(1) >= MIN_SAMPLES)


def _extend_limit(end: float, name: str, side: int) -> float:
    """A limit of a measure, moved LIMIT_MARGIN times as far from the neutral value."""
    neutral = NEUTRAL_MEASURES.get(name, 0.0)
    return neutral + (end - neutral) * (LIMIT_MARGIN if side * (end - neutral) > 0 else 1 / LIMIT_MARGIN)


def _upper_bin(counts: NDArray[np.int64], rate: float) -> int:
    """The bin above which at most a fraction `rate` of the counts is."""
    above = counts.sum() - np.cumsum(counts)
    return int(np.argmax(above <= rate * counts.sum()))
