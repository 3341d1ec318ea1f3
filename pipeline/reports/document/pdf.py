"""An audit as a PDF on A4, without system libraries: the officer's page, then the rest. The same facts, the same bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from reportlab.lib.colors import HexColor
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.platypus import BaseDocTemplate, Frame, KeepInFrame, KeepTogether, PageBreak, PageTemplate, Spacer
from reportlab.platypus import Image as Drawn
from reportlab.platypus import Paragraph as Lines
from reportlab.platypus import Table as Grid

from pipeline.core.files import write_atomically
from pipeline.reports.document.blocks import Block, Chapter, Drawing, Photo, Report, Table, Tiles, Words
from pipeline.reports.document.figure_style import HALF, INK
from pipeline.reports.document.page import Cell, Column
from privacy.audit.document.figures import png_of

MARGIN, FOOT = 17 * mm, 16 * mm
WIDTH, HEIGHT = A4[0] - 2 * MARGIN, A4[1] - MARGIN - FOOT


def write_pdf(report: Report, path: Path) -> Path:
    pictures: dict[str, bytes] = {}
    pages, _ = _built(report, pictures, 0)
    return write_atomically(path, _built(report, pictures, pages)[1])


def _built(report: Report, pictures: dict[str, bytes], pages: int) -> tuple[int, bytes]:
    """Once to count the pages and once to number them."""
    buffer = io.BytesIO()

    def foot(canvas: Any, doc: Any) -> None:
        canvas.saveState()
        canvas.setFont(font("Body"), 7)
        canvas.setFillColor(QUIET)
        canvas.drawString(MARGIN, 9 * mm, "Research use only, not a medical device. Written by hemofed.")
        canvas.drawRightString(A4[0] - MARGIN, 9 * mm, f"{cut(report.title, 60)} · page {doc.page} of {pages}")
        canvas.restoreState()

    doc = BaseDocTemplate(buffer, pagesize=A4, title=report.title, author="hemofed", subject=report.subtitle,
                          lang="en-GB", invariant=1)  # fmt: skip
    frame = Frame(MARGIN, FOOT, WIDTH, HEIGHT, leftPadding=0, rightPadding=0, topPadding=0, bottomPadding=0)
    doc.addPageTemplates([PageTemplate("page", [frame], onPage=foot)])
    doc.build(_story(report, pictures))
    return doc.page, buffer.getvalue()


def _story(report: Report, pictures: dict[str, bytes]) -> list[Any]:
    first, *others = report.chapters
    top = [words(report.title, "title"), words(report.subtitle, "note")]
    if report.notice:
        top += [Spacer(1, 4), Grid([[words(report.notice, "warn")]], [WIDTH], style=_boxed(), hAlign="LEFT")]
    page = [*top, *(part for group in _chapter(first, pictures, large=True) for part in group)]
    story: list[Any] = [KeepInFrame(WIDTH, HEIGHT - 1, page, mode="shrink")]
    for number, chapter in enumerate(others):
        story.append(PageBreak() if chapter.page or not number else Spacer(1, 10))
        story += map(KeepTogether, _chapter(chapter, pictures))
    return story


def _chapter(chapter: Chapter, pictures: dict[str, bytes], large: bool = False) -> list[list[Any]]:
    """Parts that a page's end may come between; the heading stays with what follows it."""
    parts: list[list[Any]] = []
    left = list(chapter.blocks)
    while left:
        match left:
            case [Drawing() as drawing, Table() as table, *left] if drawing.figure.get_figwidth() <= HALF[0]:
                parts.append([_beside(drawing, table, pictures), Spacer(1, 6)])
            case [block, *left]:
                parts += _block(block, pictures, large)
    return [[_Heading(chapter.title), *(parts[0] if parts else [])], *parts[1:]]


def _beside(drawing: Drawing, table: Table, pictures: dict[str, bytes]) -> Any:
    """A small figure and a table share the width."""
    gap = 0.04 * WIDTH
    half = (WIDTH - gap) / 2
    columns = [_drawn(drawing, half, pictures), [words(table.caption, "note"), _table(table, half)]]
    bare = [("VALIGN", (0, 0), (-1, -1), "TOP"), ("LEFTPADDING", (0, 0), (-1, -1), 0), ("RIGHTPADDING", (0, 0), (0, 0), gap),
            ("RIGHTPADDING", (1, 0), (1, 0), 0), ("TOPPADDING", (0, 0), (-1, -1), 0)]  # fmt: skip
    return Grid([columns], [half + gap, half], style=bare, hAlign="LEFT")


class _Heading(Lines):  # type: ignore[misc]
    """Also a bookmark."""

    def __init__(self, title: str) -> None:
        super().__init__(safe(title), style_of("heading"))
        self.title = printable(title)

    def draw(self) -> None:
        key = f"{self.canv.getPageNumber()}-{self.title}"
        self.canv.bookmarkPage(key)
        self.canv.addOutlineEntry(self.title, key, 0)
        super().draw()


def _block(block: Block, pictures: dict[str, bytes], large: bool) -> list[list[Any]]:
    match block:
        case Words(paragraphs):
            return [[words(text, "body")] for text in paragraphs]
        case Tiles(tiles):
            return [[_tiles(tiles), Spacer(1, 6)]]
        case Table():
            caption = [words(block.caption, "note")] if block.caption else []
            return [[*caption, _table(block, WIDTH, large), Spacer(1, 8)]]
        case Drawing():
            width = WIDTH if block.figure.get_figwidth() > HALF[0] else 0.6 * WIDTH
            return [[*_drawn(block, width, pictures), Spacer(1, 6)]]
        case Photo(title, png, note):
            return [[words(title, "strong"), _fitted(png), words(note, "note"), Spacer(1, 6)]]


def _drawn(drawing: Drawing, width: float, pictures: dict[str, bytes]) -> list[Any]:
    if drawing.key not in pictures:
        pictures[drawing.key] = png_of(drawing.figure)
    height = width * drawing.figure.get_figheight() / drawing.figure.get_figwidth()
    return [_image(pictures[drawing.key], width, height), words(drawing.caption, "note")]


def _image(png: bytes, width: float, height: float) -> Any:
    fit = min(1.0, 0.8 * HEIGHT / height)
    return Drawn(io.BytesIO(png), width * fit, height * fit, hAlign="LEFT")


def _fitted(png: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        width, height = picture.size
    return _image(png, WIDTH, WIDTH * height / width)


def _table(table: Table, width: float, large: bool = False) -> Any:
    shares = table.widths or [1 / len(table.columns)] * len(table.columns)
    titles = [words(column.title, "number_head" if column.numeric else "head") for column in table.columns]
    head = [titles] if any(column.title for column in table.columns) else []
    rows = [
        [
            _cell(cell, column, not place, large)
            for place, (cell, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        for row in table.rows
    ]
    pad = 5 if large else 2.5
    style = [("VALIGN", (0, 0), (-1, -1), "TOP"), ("LINEBELOW", (0, 0), (-1, -1), 0.4, LINE),
             ("LEFTPADDING", (0, 0), (0, -1), 0), ("LEFTPADDING", (1, 0), (-1, -1), 5), ("RIGHTPADDING", (0, 0), (-1, -1), 3),
             ("TOPPADDING", (0, 0), (-1, -1), pad), ("BOTTOMPADDING", (0, 0), (-1, -1), pad + 0.5)]  # fmt: skip
    return Grid(head + rows, [part * width for part in shares], repeatRows=len(head), style=style, hAlign="LEFT")


def _cell(cell: Cell, column: Column, first: bool, large: bool) -> Any:
    value, note = (cell, "") if isinstance(cell, str) else cell
    style = "number" if column.numeric else "strong" if first else "cell"
    main = words(value, f"large_{style}" if large else style)
    return [main, words(note, "note")] if note else main


def _tiles(tiles: Sequence[tuple[str, Cell]]) -> Any:
    def one(label: str, cell: Cell) -> list[Any]:
        value, note = (cell, "") if isinstance(cell, str) else cell
        return [words(label, "note"), words(value, "tile"), *([words(note, "note")] if note else [])]

    style = [("BACKGROUND", (0, 0), (-1, -1), GROUND), ("VALIGN", (0, 0), (-1, -1), "TOP"),
             ("INNERGRID", (0, 0), (-1, -1), 3, WHITE), ("TOPPADDING", (0, 0), (-1, -1), 4)]  # fmt: skip
    return Grid(
        [[one(label, cell) for label, cell in tiles]], [WIDTH / len(tiles)] * len(tiles), style=style, hAlign="LEFT"
    )


def _boxed() -> list[Any]:
    return [("LINEBEFORE", (0, 0), (0, -1), 3, WARN), ("BACKGROUND", (0, 0), (-1, -1), WARM)]


# Type for the printed audit: fonts that come with matplotlib, a few styles, and text that is safe to print.

QUIET, LINE, ACCENT, WARN, GROUND, WHITE, WARM = map(
    HexColor, ("#5b6675", "#d3d8de", "#2f6aa8", "#8a4b00", "#f3f5f8", "#ffffff", "#fff4e0")
)
FONTS = {"Body": "DejaVuSans.ttf", "Body-Bold": "DejaVuSans-Bold.ttf"}


def words(text: str, style: str) -> Any:
    return Lines(safe(text), style_of(style))


def safe(text: str) -> str:
    """Nothing in a name is markup, and nothing is printed as an empty box."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def printable(text: str) -> str:
    """A character that the font lacks is named by its number."""
    glyphs: Mapping[int, int] = pdfmetrics.getFont(font("Body")).face.charToGlyph
    return "".join(one if ord(one) in glyphs else f"[U+{ord(one):04X}]" for one in text)


def cut(text: str, length: int) -> str:
    shown = printable(text)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


@cache
def font(name: str) -> str:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    pdfmetrics.registerFont(TTFont(f"Hemofed-{name}", str(folder / FONTS[name])))
    return f"Hemofed-{name}"


@cache
def style_of(name: str) -> Any:
    plain = name.removeprefix("large_")
    sizes = {"title": 15.0, "heading": 11.5, "tile": 11.0, "note": 6.9, "head": 7.0, "number_head": 7.0}
    size = sizes.get(plain, 9.0 if plain != name else 8.0)
    colours = {"note": QUIET, "head": QUIET, "number_head": QUIET, "heading": ACCENT, "warn": WARN}
    return ParagraphStyle(
        name,
        fontName=font("Body-Bold" if plain in ("title", "heading", "tile", "strong") else "Body"),
        fontSize=size,
        leading=1.36 * size,
        textColor=colours.get(plain, HexColor(INK)),
        alignment=2 if plain.startswith("number") else 0,
        spaceBefore=4 if plain == "heading" else 0,
        spaceAfter={"heading": 4, "body": 5, "note": 2}.get(plain, 0),
    )
