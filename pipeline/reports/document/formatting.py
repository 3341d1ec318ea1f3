"""Formats numbers for readers: percentages, durations, bytes, and the display names of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNDEFINED_TEXT = "–"

METRIC_LABELS: Mapping[str, str] = {
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
PERCENT_METRICS = frozenset({"accuracy", "balanced_accuracy", "sensitivity_at_specificity"})
SPLIT_LABELS: Mapping[str, str] = {"test": "test", "val": "validation", "train": "training"}


def metric_label(metric: str) -> str:
    return METRIC_LABELS.get(metric, metric.replace("_", " ").capitalize())


def format_score(metric: str, value: float | None, digits: int = 3) -> str:
    """`digits`: of the fraction, so 3 gives 0.987 or 98.7 %."""
    if value is None:
        return UNDEFINED_TEXT
    return f"{100 * value:.{digits - 2}f} %" if metric in PERCENT_METRICS else f"{value:.{digits}f}"


def format_interval(metric: str, low: float, high: float) -> str:
    """`(low to high)`, to follow the score."""
    low_text, high_text = (format_score(metric, edge).removesuffix(" %") for edge in (low, high))
    return f"({low_text} to {high_text})"


def format_points(difference: float) -> str:
    """A difference of fractions in percentage points, with its sign."""
    rounded = round(100 * difference, 1)
    return f"{abs(rounded):.1f}" if rounded == 0 else f"{'+' if rounded > 0 else '−'}{abs(rounded):.1f}"


def join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def format_integer(value: float | None) -> str:
    return UNDEFINED_TEXT if value is None else f"{value:,.0f}"


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return UNDEFINED_TEXT
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_bytes(num_bytes: float | None) -> str:
    """In decimal units: 1 kB is 1000 bytes."""
    if num_bytes is None:
        return UNDEFINED_TEXT
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.95:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} TB"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shorten_text(text: str, max_length: int = 26) -> str:
    return text if len(text) <= max_length else text[: max_length - 1] + "…"
