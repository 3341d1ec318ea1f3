"""Metrics from summable pieces: the same for one site, for all together, and for the coordinator's own test set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.protocol.tasks import Evaluated

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Focus:
    """The class that matters, and the specificity at which its sensitivity is read."""

    positive: int | None = None
    specificity: float = 0.95


NO_FOCUS = Focus()


def metrics(seen: Evaluated, focus: Focus = NO_FOCUS) -> dict[str, float | None]:
    """Undefined values (no examples, one class only) are None, never 0 or nan."""
    confusion = seen.confusion.numpy().astype(np.float64)
    n, hits = float(seen.n), np.diag(confusion)
    truth, guessed = confusion.sum(1), confusion.sum(0)
    present = truth > 0
    if not n:
        return {"n": 0, **dict.fromkeys(_names(focus))}
    recall = hits[present] / truth[present]
    f1 = 2 * hits[present] / (truth + guessed)[present]
    curves = [Curve.of(scores) for scores in seen.scores.numpy()]
    areas = [(c.auroc, c.auprc) for c, here in zip(curves, present, strict=True) if here and c.defined]
    _, confidence, correct = seen.calibration.numpy().T
    out: dict[str, float | None] = {
        "n": int(n),
        "loss": float(seen.loss) / n if math.isfinite(float(seen.loss)) else None,
        "accuracy": float(hits.sum() / n),
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float(f1.mean()),
        "auroc": float(np.mean([a for a, _ in areas])) if areas else None,
        "auprc": float(np.mean([p for _, p in areas])) if areas else None,
        "calibration_error": float(np.abs(confidence - correct).sum() / n),
    }
    if focus.positive is not None:
        curve = curves[focus.positive]
        out["positive_auroc"] = curve.auroc if curve.defined else None
        out["positive_auprc"] = curve.auprc if curve.defined else None
        out["sensitivity_at_specificity"] = curve.sensitivity(focus.specificity) if curve.defined else None
    return out


def _names(focus: Focus) -> list[str]:
    plain = ["loss", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "auprc", "calibration_error"]
    return plain + (
        ["positive_auroc", "positive_auprc", "sensitivity_at_specificity"] if focus.positive is not None else []
    )


@dataclass(frozen=True)
class Curve:
    """ROC and precision-recall of one class against the rest, thresholds from high to low."""

    positives: Floats  # at or above each threshold
    negatives: Floats

    @classmethod
    def of(cls, scores: NDArray[Any]) -> Curve:
        """scores (2, bins): counts of [others, class]."""
        others, own = np.cumsum(scores[:, ::-1], axis=1).astype(np.float64)
        return cls(np.concatenate([[0.0], own]), np.concatenate([[0.0], others]))

    @property
    def defined(self) -> bool:
        return bool(self.positives[-1] > 0 and self.negatives[-1] > 0)

    @property
    def tpr(self) -> Floats:
        return np.asarray(self.positives / self.positives[-1])

    @property
    def fpr(self) -> Floats:
        return np.asarray(self.negatives / self.negatives[-1])

    @property
    def precision(self) -> Floats:
        called = self.positives + self.negatives
        return np.divide(self.positives, called, out=np.ones_like(called), where=called > 0)

    @property
    def auroc(self) -> float:
        return float(np.trapezoid(self.tpr, self.fpr))  # ties within a bin count half

    @property
    def auprc(self) -> float:
        """Average precision, as scikit-learn's; within a bin positives and negatives are taken as evenly mixed."""
        own, others = np.diff(self.positives).astype(np.int64), np.diff(self.negatives)
        at = np.repeat(np.arange(len(own)), own)  # the bin of each positive, and which one of its bin it is
        nth = np.arange(1, len(at) + 1) - self.positives[at]
        above = self.positives[at] + nth
        precision = above / (above + self.negatives[at] + others[at] * nth / (own[at] + 1))
        return float(precision.mean())

    def sensitivity(self, specificity: float) -> float:
        return float(self.tpr[self.fpr <= 1 - specificity + 1e-12].max())


def details(seen: Evaluated, focus: Focus) -> dict[str, Any]:
    """What plots need beside the metrics: confusion matrix, curves, reliability."""
    curves = [Curve.of(scores) for scores in seen.scores.numpy()]
    out: dict[str, Any] = {
        "confusion": seen.confusion.tolist(),
        "class_auroc": [curve.auroc if curve.defined else None for curve in curves],
    }
    which = focus.positive if focus.positive is not None else 1 if len(seen.confusion) == 2 else None
    if which is not None and (curve := curves[which]).defined:
        keep = np.flatnonzero(
            np.diff(curve.positives + curve.negatives, prepend=-1)
        )  # thresholds that tell anything apart
        out["roc"] = {"fpr": curve.fpr[keep].tolist(), "tpr": curve.tpr[keep].tolist()}
        out["pr"] = {"recall": curve.tpr[keep].tolist(), "precision": curve.precision[keep].tolist()}
    rows = seen.calibration.numpy()
    out["reliability"] = [[c / n, k / n, int(n)] for n, c, k in rows if n]
    return out
