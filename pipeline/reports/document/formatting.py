"""Numbers as people read them: percentages, seconds, bytes, and a name for every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNDEFINED = "–"

METRICS: Mapping[str, str] = {
    "accuracy": "Accuracy",
    "balanced_accuracy": "Balanced accuracy",
    "macro_f1": "Macro F1",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "positive_auroc": "AUROC, positive class",
    "positive_auprc": "AUPRC, positive class",
    "sensitivity_at_specificity": "Sensitivity at fixed specificity",
    "calibration_error": "Calibration error",
    "loss": "Loss",
}
PERCENT = frozenset({"accuracy", "balanced_accuracy", "sensitivity_at_specificity"})
SPLITS: Mapping[str, str] = {"test": "test", "val": "validation", "train": "training"}


def metric_name(name: str) -> str:
    return METRICS.get(name, name.replace("_", " ").capitalize())


def score(name: str, value: float | None) -> str:
    if value is None:
        return UNDEFINED
    return f"{100 * value:.1f} %" if name in PERCENT else f"{value:.3f}"


def span(name: str, low: float, high: float) -> str:
    """The edges of an interval, to be read behind its score."""
    low_words, high_words = (score(name, edge).removesuffix(" %") for edge in (low, high))
    return f"({low_words} to {high_words})"


def points(difference: float) -> str:
    """A difference of shares in hundredths, with its sign."""
    rounded = round(100 * difference, 1)
    return f"{abs(rounded):.1f}" if rounded == 0 else f"{'+' if rounded > 0 else '−'}{abs(rounded):.1f}"


def joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def whole(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return UNDEFINED
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float | None) -> str:
    """Decimal units, as networks are billed."""
    if count is None:
        return UNDEFINED
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shorten(text: str, length: int = 26) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
