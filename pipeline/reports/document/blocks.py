"""A report as data: chapters of blocks, which html.py and pdf.py render with the same content."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.reports.document.page import TableCell, TableColumn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TextBlock:
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class TileBlock:
    tiles: Sequence[tuple[str, TableCell]]


@dataclass(frozen=True)
class TableBlock:
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[TableCell]]
    caption: str = ""
    column_shares: Sequence[float] = ()  # of the printed width; equal if not given


@dataclass(frozen=True)
class FigureBlock:
    key: str  # unique within the report
    figure: Figure
    caption: str


@dataclass(frozen=True)
class ImageBlock:
    title: str
    png: bytes
    note: str


ReportBlock = TextBlock | TileBlock | TableBlock | FigureBlock | ImageBlock


@dataclass(frozen=True)
class ReportChapter:
    title: str
    blocks: Sequence[ReportBlock]
    starts_new_page: bool = False  # in print


@dataclass(frozen=True)
class ReportDocument:
    title: str
    subtitle: str
    notice: str
    chapters: Sequence[ReportChapter]


def question_table(
    rows: Sequence[tuple[str, str]], question: str = "", answer: str = "", caption: str = ""
) -> TableBlock:
    """A table of two columns: a heading and its text."""
    return TableBlock([TableColumn(question), TableColumn(answer, is_text=True)], rows, caption, (0.2, 0.8))


def format_share(value: float) -> str:
    """A percentage with enough digits to differ from 100 %."""
    if value < 0.1:
        return f"{100 * value:.3g} %"
    digits = 1 if value < 0.99 or value == 1 else min(9, math.ceil(-math.log10(1 - value)) - 2)
    return f"{100 * value:.{max(1, digits)}f} %"


def format_chance(value: float) -> str:
    """A probability; a small one as `one in N`."""
    return f"one in {1 / value:,.0f}" if 0 < value < 0.01 else f"{value:g}"


def format_factor(factor: float) -> str:
    if factor < 10:
        return f"{factor:.2f}"
    return f"{factor:,.0f}" if factor < 1e6 else "over a million"


def format_epsilon(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"
