"""Confidence intervals by the bootstrap over privacy units: cells of one patient are correlated, so patients are resampled.

With few units such intervals are too narrow (95 % intervals cover about 82 % with 5 units, 91 % with 9, 94 % with 30), so
fewer than MIN_UNITS get no interval. Resamples depend only on the seed and the units: two models on the same test examples
get the same resamples, so their differences are paired.

Only a simulation has the scores of all examples; hospitals send only sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.coordinator.metrics import PositiveClass

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
ConfidenceInterval = list[float]  # [low, high], a list as in JSON
NUM_RESAMPLES = 1000
CONFIDENCE_LEVEL = 0.95
MIN_UNITS = 10  # for curves: at least half as many units with the class and half as many with others
MAX_CHUNK_ELEMENTS = 4_000_000  # numbers in memory at once


@dataclass(frozen=True)
class ScoredExamples:
    """N test examples. Scores are binned as in EvaluationSums, so that a metric lies within its interval."""

    score_bins: IntArray  # (N, C)
    predicted: IntArray  # (N,)
    labels: IntArray
    units: IntArray

    def select(self, mask: NDArray[np.bool_]) -> ScoredExamples:
        return ScoredExamples(self.score_bins[mask], self.predicted[mask], self.labels[mask], self.units[mask])


def confidence_intervals(
    examples: ScoredExamples, positive_class: PositiveClass, seed: int = 0
) -> dict[str, ConfidenceInterval]:
    """metric -> [low, high]; without metrics that are undefined in most resamples."""
    resampled = bootstrap_metrics(examples, positive_class, seed)
    return {
        metric: interval
        for metric, values in resampled.items()
        if (interval := _percentile_interval(values)) is not None
    }


def bootstrap_metrics(
    examples: ScoredExamples, positive_class: PositiveClass, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> dict[str, FloatArray]:
    """metric -> (num_resamples,), nan where undefined; empty for too few units."""
    unique_units, unit = np.unique(examples.units, return_inverse=True)
    if len(unique_units) < MIN_UNITS:
        return {}
    unit_counts = _resample_unit_counts(len(unique_units), num_resamples, seed)
    num_classes, labels = examples.score_bins.shape[1], examples.labels
    resampled = _bootstrap_accuracy(examples.predicted, labels, unit, unit_counts, num_classes)
    class_index = (
        positive_class.class_index if positive_class.class_index is not None else 1 if num_classes == 2 else None
    )
    if (
        class_index is not None
        and min(len(np.unique(unit[labels == class_index])), len(np.unique(unit[labels != class_index])))
        >= MIN_UNITS // 2
    ):
        curves = _bootstrap_curves(
            examples.score_bins[:, class_index],
            labels == class_index,
            unit,
            unit_counts,
            positive_class.target_specificity,
        )
        curve_names = ["positive_auroc", "positive_auprc", "sensitivity_at_specificity"]
        resampled |= (
            dict(zip(curve_names, curves, strict=True))
            if positive_class.class_index is not None
            else {"auroc": curves[0]}
        )
    return resampled


def _resample_unit_counts(num_units: int, num_resamples: int, seed: int) -> FloatArray:
    """(D, U): how often each unit occurs in each resample."""
    sampled_units = np.random.default_rng([seed, 0xB007]).integers(0, num_units, (num_resamples, num_units))
    flat_index = sampled_units + np.arange(num_resamples)[:, None] * num_units
    return (
        np.bincount(flat_index.ravel(), minlength=num_resamples * num_units)
        .reshape(num_resamples, num_units)
        .astype(np.float64)
    )


def _bootstrap_accuracy(
    predicted: IntArray, labels: IntArray, unit: IntArray, unit_counts: FloatArray, num_classes: int
) -> dict[str, FloatArray]:
    """These are ratios of sums over units, so one matrix product gives all resamples."""
    shape = (unit_counts.shape[1], num_classes)
    label_counts, correct_counts = np.zeros(shape), np.zeros(shape)
    np.add.at(label_counts, (unit, labels), 1)
    np.add.at(correct_counts, (unit, labels), predicted == labels)
    resampled_labels, resampled_correct = unit_counts @ label_counts, unit_counts @ correct_counts  # (D, C)
    is_present = label_counts.sum(0) > 0  # a resample without one of these classes has no balanced accuracy
    recall = np.divide(
        resampled_correct, resampled_labels, out=np.full_like(resampled_correct, np.nan), where=resampled_labels > 0
    )[:, is_present]
    return {"accuracy": resampled_correct.sum(1) / resampled_labels.sum(1), "balanced_accuracy": recall.mean(1)}


def _bootstrap_curves(
    score_bin: IntArray, is_positive: NDArray[np.bool_], unit: IntArray, unit_counts: FloatArray, specificity: float
) -> list[FloatArray]:
    """AUROC, average precision and sensitivity of every resample; nan where a resample has one class only."""
    order = np.argsort(-score_bin, kind="stable")
    score_bin, is_positive, unit = score_bin[order], is_positive[order], unit[order]
    tie_ends = np.flatnonzero(np.append(np.diff(score_bin) != 0, True))  # the last index of each group of ties
    chunks = list(_chunk_curves(is_positive, unit, tie_ends, unit_counts, specificity))
    return [np.concatenate(chunk) for chunk in zip(*chunks, strict=True)]


def _chunk_curves(
    is_positive: NDArray[np.bool_], unit: IntArray, tie_ends: IntArray, unit_counts: FloatArray, specificity: float
) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
    for chunk in np.array_split(unit_counts, max(1, unit_counts.shape[0] * len(is_positive) // MAX_CHUNK_ELEMENTS)):
        weight = chunk[:, unit]  # (d, N)
        tp = np.cumsum(weight * is_positive, 1)[:, tie_ends]
        fp = np.cumsum(weight * ~is_positive, 1)[:, tie_ends]
        with np.errstate(invalid="ignore", divide="ignore"):
            tpr, fpr = tp / tp[:, -1:], fp / fp[:, -1:]
            recall_gain = np.diff(tpr, prepend=0.0)
            precision = np.where(tp + fp > 0, tp / (tp + fp), 0)
        undefined = (tp[:, -1] == 0) | (fp[:, -1] == 0)
        auroc = np.trapezoid(np.pad(tpr, ((0, 0), (1, 0))), np.pad(fpr, ((0, 0), (1, 0))), axis=1)
        sensitivity = np.where(fpr <= 1 - specificity + 1e-12, tpr, 0).max(1)
        yield tuple(
            np.where(undefined, np.nan, values) for values in (auroc, (recall_gain * precision).sum(1), sensitivity)
        )  # type: ignore[misc]


def _percentile_interval(values: FloatArray) -> ConfidenceInterval | None:
    defined = values[np.isfinite(values)]
    if len(defined) < len(values) / 2:
        return None
    low, high = np.quantile(defined, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return [float(low), float(high)]
