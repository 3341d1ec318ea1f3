"""A report as data: chapters of blocks, which a page (audit_page.py) and a PDF (audit_pdf.py) show alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.reports.document.page import Cell, Column

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Words:
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Tiles:
    tiles: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    widths: Sequence[float] = ()  # shares of a printed page; alike if not given


@dataclass(frozen=True)
class Drawing:
    key: str  # a word of its own within the report
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Photo:
    title: str
    png: bytes
    note: str


Block = Words | Tiles | Table | Drawing | Photo


@dataclass(frozen=True)
class Chapter:
    title: str
    blocks: Sequence[Block]
    page: bool = False  # begins a new one in print


@dataclass(frozen=True)
class Report:
    title: str
    subtitle: str
    notice: str
    chapters: Sequence[Chapter]


def answers(rows: Sequence[tuple[str, str]], question: str = "", answer: str = "", caption: str = "") -> Table:
    """Headings beside their text."""
    return Table([Column(question), Column(answer, words=True)], rows, caption, (0.2, 0.8))


def share(value: float) -> str:
    """With as many digits as tell it from certainty."""
    if value < 0.1:
        return f"{100 * value:.3g} %"
    digits = 1 if value < 0.99 or value == 1 else min(9, math.ceil(-math.log10(1 - value)) - 2)
    return f"{100 * value:.{max(1, digits)}f} %"


def chance(value: float) -> str:
    """A small one, as people say it."""
    return f"one in {1 / value:,.0f}" if 0 < value < 0.01 else f"{value:g}"


def times(factor: float) -> str:
    if factor < 10:
        return f"{factor:.2f}"
    return f"{factor:,.0f}" if factor < 1e6 else "over a million"


def eps(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"
