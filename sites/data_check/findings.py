"""What a look at a site's data found: how grave it is, what it is, and the cure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["stop", "look", "fine"]
LEVELS: tuple[Level, ...] = ("stop", "look", "fine")  # gravest first
SHOWN = 8  # names behind a finding on the screen
Tick = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


@dataclass(frozen=True)
class Finding:
    """`where` are file names, or rows, in which no identifier stands any more."""

    level: Level
    about: Literal["files", "counts", "pixels", "copies", "identity"]
    what: str
    cure: str = ""
    where: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        return {"level": self.level, "about": self.about, "what": self.what, "cure": self.cure, "where": self.where}


def verdict(findings: Iterable[Finding]) -> Level:
    found = {finding.level for finding in findings}
    return next((level for level in LEVELS if level in found), "fine")


def gravest_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def some(names: Sequence[str], most: int = SHOWN) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def silent(doing: str, done: int, total: int) -> None:
    """A Tick for nobody."""
