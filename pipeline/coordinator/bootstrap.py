"""Confidence intervals by the bootstrap over whole units: cells of one patient are alike, so patients are drawn.

With few units such intervals are too narrow (of nominally 95 % some 82 with five units, 91 with nine, 94 with thirty),
so fewer than FEWEST get none. Draws depend on the seed and the units alone: two models on the same test examples are
drawn alike, so the draws of their difference are the difference of their draws.

Only a simulation has every example's score in one place; between hospitals only sums travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.coordinator.metrics import PositiveClass

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
ConfidenceInterval = list[float]  # [low, high], as JSON has it
NUM_RESAMPLES = 1000
CONFIDENCE_LEVEL = 0.95
MIN_UNITS = 10  # units; of curves, half as many with the class and half as many with others
MAX_CHUNK_ELEMENTS = 4_000_000  # numbers held at once


@dataclass(frozen=True)
class ScoredExamples:
    """Of N test examples; scores in the bins that also the sites' sums have, so that a score lies in its interval."""

    score_bins: IntArray  # (N, C)
    predicted: IntArray  # (N,)
    labels: IntArray
    units: IntArray

    def select(self, mask: NDArray[np.bool_]) -> ScoredExamples:
        return ScoredExamples(self.score_bins[mask], self.predicted[mask], self.labels[mask], self.units[mask])


def confidence_intervals(
    examples: ScoredExamples, positive_class: PositiveClass, seed: int = 0
) -> dict[str, ConfidenceInterval]:
    """metric: [low, high] of what `drawn` gives; undefined ones are left out."""
    resampled = bootstrap_metrics(examples, positive_class, seed)
    return {
        metric: interval
        for metric, values in resampled.items()
        if (interval := _percentile_interval(values)) is not None
    }


def bootstrap_metrics(
    examples: ScoredExamples, positive_class: PositiveClass, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> dict[str, FloatArray]:
    """metric: (draws,), nan where undefined; nothing for too few units."""
    unique_units, unit = np.unique(examples.units, return_inverse=True)
    if len(unique_units) < MIN_UNITS:
        return {}
    unit_counts, num_classes, labels = (
        _draw_unit_counts(len(unique_units), num_resamples, seed),
        examples.score_bins.shape[1],
        examples.labels,
    )
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


def _draw_unit_counts(num_units: int, num_resamples: int, seed: int) -> FloatArray:
    """(D, U): how often each unit is drawn."""
    drawn_units = np.random.default_rng([seed, 0xB007]).integers(0, num_units, (num_resamples, num_units))
    flat_index = drawn_units + np.arange(num_resamples)[:, None] * num_units
    return (
        np.bincount(flat_index.ravel(), minlength=num_resamples * num_units)
        .reshape(num_resamples, num_units)
        .astype(np.float64)
    )


def _bootstrap_accuracy(
    predicted: IntArray, labels: IntArray, unit: IntArray, unit_counts: FloatArray, num_classes: int
) -> dict[str, FloatArray]:
    """Ratios of sums over units, so a product of matrices gives all draws."""
    shape = (unit_counts.shape[1], num_classes)
    label_counts, correct_counts = np.zeros(shape), np.zeros(shape)
    np.add.at(label_counts, (unit, labels), 1)
    np.add.at(correct_counts, (unit, labels), predicted == labels)
    resampled_labels, resampled_correct = unit_counts @ label_counts, unit_counts @ correct_counts  # (D, C)
    is_present = label_counts.sum(0) > 0  # a draw that lacks one of these classes has no balanced accuracy
    recall = np.divide(
        resampled_correct, resampled_labels, out=np.full_like(resampled_correct, np.nan), where=resampled_labels > 0
    )[:, is_present]
    return {"accuracy": resampled_correct.sum(1) / resampled_labels.sum(1), "balanced_accuracy": recall.mean(1)}


def _bootstrap_curves(
    score_bin: IntArray, is_positive: NDArray[np.bool_], unit: IntArray, unit_counts: FloatArray, specificity: float
) -> list[FloatArray]:
    """AUROC, average precision and sensitivity of every draw; nan where a draw has one class only."""
    order = np.argsort(-score_bin, kind="stable")
    score_bin, is_positive, unit = score_bin[order], is_positive[order], unit[order]
    tie_ends = np.flatnonzero(np.append(np.diff(score_bin) != 0, True))  # ties end together
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
