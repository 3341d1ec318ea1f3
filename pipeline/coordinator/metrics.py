"""Metrics from EvaluationSums: of one site, of all sites pooled, or of the coordinator's test set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.protocol.tasks import EvaluationSums
from pipeline.records.scores import ModelMetrics, PrPoints, RocPoints

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PositiveClass:
    """The clinically relevant class, and the specificity at which its sensitivity is reported."""

    class_index: int | None = None
    target_specificity: float = 0.95


NO_POSITIVE_CLASS = PositiveClass()


def compute_metrics(sums: EvaluationSums, positive_class: PositiveClass = NO_POSITIVE_CLASS) -> ModelMetrics:
    """Undefined values (no examples, one class only) are None, not 0 or nan."""
    confusion = sums.confusion.numpy().astype(np.float64)
    n, true_positives = float(sums.n), np.diag(confusion)
    truth, predicted = confusion.sum(1), confusion.sum(0)
    present = truth > 0
    if not n:
        return ModelMetrics.model_validate({"n": 0, **dict.fromkeys(_metric_names(positive_class))})
    recall = true_positives[present] / truth[present]
    f1 = 2 * true_positives[present] / (truth + predicted)[present]
    curves = [RocPrCurve.from_histogram(scores) for scores in sums.scores.numpy()]
    areas = [(c.auroc, c.auprc) for c, is_present in zip(curves, present, strict=True) if is_present and c.is_defined]
    _, confidence, correct = sums.calibration.numpy().T
    metrics = ModelMetrics(
        n=int(n),
        loss=float(sums.loss) / n,
        accuracy=float(true_positives.sum() / n),
        balanced_accuracy=float(recall.mean()),
        macro_f1=float(f1.mean()),
        auroc=float(np.mean([a for a, _ in areas])) if areas else None,
        auprc=float(np.mean([p for _, p in areas])) if areas else None,
        calibration_error=float(np.abs(confidence - correct).sum() / n),
    )
    if positive_class.class_index is None:
        return metrics
    curve = curves[positive_class.class_index]
    return metrics.model_copy(
        update={
            "positive_auroc": curve.auroc if curve.is_defined else None,
            "positive_auprc": curve.auprc if curve.is_defined else None,
            "sensitivity_at_specificity": curve.sensitivity_at(positive_class.target_specificity)
            if curve.is_defined
            else None,
        }
    )


def _metric_names(positive_class: PositiveClass) -> list[str]:
    names = ["loss", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "auprc", "calibration_error"]
    return names + (
        ["positive_auroc", "positive_auprc", "sensitivity_at_specificity"]
        if positive_class.class_index is not None
        else []
    )


@dataclass(frozen=True)
class RocPrCurve:
    """ROC and precision-recall curves of one class against the rest, thresholds from high to low."""

    positives: FloatArray  # at or above each threshold
    negatives: FloatArray

    @classmethod
    def from_histogram(cls, scores: NDArray[Any]) -> RocPrCurve:
        """scores (2, bins): counts of [others, class]."""
        negative_counts, positive_counts = np.cumsum(scores[:, ::-1], axis=1).astype(np.float64)
        return cls(np.concatenate([[0.0], positive_counts]), np.concatenate([[0.0], negative_counts]))

    @property
    def is_defined(self) -> bool:
        return bool(self.positives[-1] > 0 and self.negatives[-1] > 0)

    @property
    def tpr(self) -> FloatArray:
        return np.asarray(self.positives / self.positives[-1])

    @property
    def fpr(self) -> FloatArray:
        return np.asarray(self.negatives / self.negatives[-1])

    @property
    def precision(self) -> FloatArray:
        predicted_positives = self.positives + self.negatives
        return np.divide(
            self.positives, predicted_positives, out=np.ones_like(predicted_positives), where=predicted_positives > 0
        )

    @property
    def auroc(self) -> float:
        return float(np.trapezoid(self.tpr, self.fpr))  # ties within a bin count half

    @property
    def auprc(self) -> float:
        """Average precision as in scikit-learn; within a bin positives and negatives count as evenly mixed."""
        positive_counts, negative_counts = np.diff(self.positives).astype(np.int64), np.diff(self.negatives)
        # the bin of each positive, and its rank within the bin
        bin_index = np.repeat(np.arange(len(positive_counts)), positive_counts)
        rank_in_bin = np.arange(1, len(bin_index) + 1) - self.positives[bin_index]
        positives_above = self.positives[bin_index] + rank_in_bin
        precision = positives_above / (
            positives_above
            + self.negatives[bin_index]
            + negative_counts[bin_index] * rank_in_bin / (positive_counts[bin_index] + 1)
        )
        return float(precision.mean())

    def sensitivity_at(self, specificity: float) -> float:
        return float(self.tpr[self.fpr <= 1 - specificity + 1e-12].max())


def compute_plot_data(sums: EvaluationSums, positive_class: PositiveClass) -> dict[str, Any]:
    """The fields of ModelMetrics for plots: confusion matrix, curves, reliability."""
    curves = [RocPrCurve.from_histogram(scores) for scores in sums.scores.numpy()]
    plot_data: dict[str, Any] = {
        "confusion": tuple(tuple(int(count) for count in row) for row in sums.confusion.tolist()),
        "class_auroc": tuple(curve.auroc if curve.is_defined else None for curve in curves),
    }
    class_index = (
        positive_class.class_index
        if positive_class.class_index is not None
        else 1
        if len(sums.confusion) == 2
        else None
    )
    if class_index is not None and (curve := curves[class_index]).is_defined:
        # thresholds at which the counts change
        distinct = np.flatnonzero(np.diff(curve.positives + curve.negatives, prepend=-1))
        plot_data["roc"] = RocPoints(fpr=tuple(curve.fpr[distinct].tolist()), tpr=tuple(curve.tpr[distinct].tolist()))
        plot_data["pr"] = PrPoints(
            recall=tuple(curve.tpr[distinct].tolist()), precision=tuple(curve.precision[distinct].tolist())
        )
    bins = sums.calibration.numpy()
    plot_data["reliability"] = tuple((float(c / n), float(k / n), int(n)) for n, c, k in bins if n)
    return plot_data
