"""One finding of `hemofed site check`: its severity, what was found, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["stop", "look", "fine"]
SEVERITIES: tuple[Severity, ...] = ("stop", "look", "fine")  # most severe first
MAX_SHOWN_NAMES = 8  # names listed in one sentence
ProgressCallback = Callable[[str, int, int], None]  # task, number done, total (0: unknown)


@dataclass(frozen=True)
class Finding:
    """Personal identifiers are redacted in all texts. `locations`: file names, or rows."""

    severity: Severity
    category: Literal["files", "counts", "pixels", "copies", "identity"]
    message: str
    remedy: str = ""
    locations: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "level": self.severity,
            "category": self.category,
            "what": self.message,
            "cure": self.remedy,
            "where": self.locations,
        }


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Without findings: fine."""
    severities = {finding.severity for finding in findings}
    return next((severity for severity in SEVERITIES if severity in severities), "fine")


def sort_by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def join_names(names: Sequence[str], max_shown: int = MAX_SHOWN_NAMES) -> str:
    num_more = len(names) - max_shown
    return ", ".join(names[:max_shown]) + (f" and {num_more:,} more" if num_more > 0 else "")


def format_count(number: int, singular: str, plural: str | None = None) -> str:
    """`3 images`. With a verb in both forms it starts a sentence: `format_count(n, "image is", "images are")`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def ignore_progress(task: str, num_done: int, num_total: int) -> None:
    """A `ProgressCallback` that shows nothing."""
