"""Renders a ReportDocument as an A4 PDF: the first chapter on one page, then the others. Same content gives same bytes.

Uses reportlab and the fonts that come with matplotlib, no system libraries.
"""

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
from reportlab.platypus import (
    BaseDocTemplate,
    Frame,
    KeepInFrame,
    KeepTogether,
    PageBreak,
    PageTemplate,
    Paragraph,
    Spacer,
    Table,
)
from reportlab.platypus import Image as ImageFlowable

from pipeline.core.files import write_atomically
from pipeline.reports.document.blocks import (
    FigureBlock,
    ImageBlock,
    ReportBlock,
    ReportChapter,
    ReportDocument,
    TableBlock,
    TextBlock,
    TileBlock,
)
from pipeline.reports.document.figure_style import HALF_WIDTH_INCHES, INK_COLOR, render_png
from pipeline.reports.document.page import TableCell, TableColumn

PAGE_MARGIN_PT, FOOTER_HEIGHT_PT = 17 * mm, 16 * mm
TEXT_WIDTH_PT, TEXT_HEIGHT_PT = A4[0] - 2 * PAGE_MARGIN_PT, A4[1] - PAGE_MARGIN_PT - FOOTER_HEIGHT_PT


def write_pdf(report: ReportDocument, path: Path) -> Path:
    png_cache: dict[str, bytes] = {}
    pages, _ = _build_pdf(report, png_cache, 0)
    return write_atomically(path, _build_pdf(report, png_cache, pages)[1])


def _build_pdf(report: ReportDocument, png_cache: dict[str, bytes], num_pages: int) -> tuple[int, bytes]:
    """The page count and the PDF; `num_pages` goes to the footer, so the PDF is built twice."""
    buffer = io.BytesIO()

    def draw_footer(canvas: Any, doc: Any) -> None:
        canvas.saveState()
        canvas.setFont(register_font("Body"), 7)
        canvas.setFillColor(MUTED_COLOR)
        canvas.drawString(PAGE_MARGIN_PT, 9 * mm, "Research use only, not a medical device. Written by hemofed.")
        canvas.drawRightString(
            A4[0] - PAGE_MARGIN_PT, 9 * mm, f"{truncate_text(report.title, 60)} · page {doc.page} of {num_pages}"
        )
        canvas.restoreState()

    doc = BaseDocTemplate(
        buffer, pagesize=A4, title=report.title, author="hemofed", subject=report.subtitle, lang="en-GB", invariant=1
    )
    frame = Frame(
        PAGE_MARGIN_PT,
        FOOTER_HEIGHT_PT,
        TEXT_WIDTH_PT,
        TEXT_HEIGHT_PT,
        leftPadding=0,
        rightPadding=0,
        topPadding=0,
        bottomPadding=0,
    )
    doc.addPageTemplates([PageTemplate("page", [frame], onPage=draw_footer)])
    doc.build(_build_story(report, png_cache))
    return doc.page, buffer.getvalue()


def _build_story(report: ReportDocument, png_cache: dict[str, bytes]) -> list[Any]:
    first_chapter, *other_chapters = report.chapters
    header = [make_paragraph(report.title, "title"), make_paragraph(report.subtitle, "note")]
    if report.notice:
        header += [
            Spacer(1, 4),
            Table([[make_paragraph(report.notice, "warn")]], [TEXT_WIDTH_PT], style=_notice_style(), hAlign="LEFT"),
        ]
    first_page = [
        *header,
        *(
            flowable
            for flowables in _build_chapter(first_chapter, png_cache, use_large_text=True)
            for flowable in flowables
        ),
    ]
    story: list[Any] = [KeepInFrame(TEXT_WIDTH_PT, TEXT_HEIGHT_PT - 1, first_page, mode="shrink")]
    for number, chapter in enumerate(other_chapters):
        story.append(PageBreak() if chapter.starts_new_page or not number else Spacer(1, 10))
        story += map(KeepTogether, _build_chapter(chapter, png_cache))
    return story


def _build_chapter(
    chapter: ReportChapter, png_cache: dict[str, bytes], use_large_text: bool = False
) -> list[list[Any]]:
    """Groups of flowables that a page break may separate; the heading stays with the first group."""
    parts: list[list[Any]] = []
    remaining = list(chapter.blocks)
    while remaining:
        match remaining:
            case [FigureBlock() as drawing, TableBlock() as table, *remaining] if (
                drawing.figure.get_figwidth() <= HALF_WIDTH_INCHES[0]
            ):
                parts.append([_place_side_by_side(drawing, table, png_cache), Spacer(1, 6)])
            case [block, *remaining]:
                parts += _build_block(block, png_cache, use_large_text)
    return [[_BookmarkedHeading(chapter.title), *(parts[0] if parts else [])], *parts[1:]]


def _place_side_by_side(drawing: FigureBlock, table: TableBlock, png_cache: dict[str, bytes]) -> Any:
    """A half-width figure on the left, a table on the right."""
    gap = 0.04 * TEXT_WIDTH_PT
    half = (TEXT_WIDTH_PT - gap) / 2
    columns = [
        _build_figure(drawing, half, png_cache),
        [make_paragraph(table.caption, "note"), _build_table(table, half)],
    ]
    style = [
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
        ("LEFTPADDING", (0, 0), (-1, -1), 0),
        ("RIGHTPADDING", (0, 0), (0, 0), gap),
        ("RIGHTPADDING", (1, 0), (1, 0), 0),
        ("TOPPADDING", (0, 0), (-1, -1), 0),
    ]
    return Table([columns], [half + gap, half], style=style, hAlign="LEFT")


class _BookmarkedHeading(Paragraph):  # type: ignore[misc]
    """A heading that is also a bookmark of the PDF."""

    def __init__(self, title: str) -> None:
        super().__init__(escape_markup(title), paragraph_style("heading"))
        self.title = replace_missing_glyphs(title)

    def draw(self) -> None:
        key = f"{self.canv.getPageNumber()}-{self.title}"
        self.canv.bookmarkPage(key)
        self.canv.addOutlineEntry(self.title, key, 0)
        super().draw()


def _build_block(block: ReportBlock, png_cache: dict[str, bytes], use_large_text: bool) -> list[list[Any]]:
    match block:
        case TextBlock(paragraphs):
            return [[make_paragraph(paragraph, "body")] for paragraph in paragraphs]
        case TileBlock(tiles):
            return [[_build_tiles(tiles), Spacer(1, 6)]]
        case TableBlock():
            caption = [make_paragraph(block.caption, "note")] if block.caption else []
            return [[*caption, _build_table(block, TEXT_WIDTH_PT, use_large_text), Spacer(1, 8)]]
        case FigureBlock():
            width = TEXT_WIDTH_PT if block.figure.get_figwidth() > HALF_WIDTH_INCHES[0] else 0.6 * TEXT_WIDTH_PT
            return [[*_build_figure(block, width, png_cache), Spacer(1, 6)]]
        case ImageBlock(title, png, note):
            return [
                [make_paragraph(title, "strong"), _full_width_image(png), make_paragraph(note, "note"), Spacer(1, 6)]
            ]


def _build_figure(drawing: FigureBlock, width: float, png_cache: dict[str, bytes]) -> list[Any]:
    if drawing.key not in png_cache:
        png_cache[drawing.key] = render_png(drawing.figure)
    height = width * drawing.figure.get_figheight() / drawing.figure.get_figwidth()
    return [_scaled_image(png_cache[drawing.key], width, height), make_paragraph(drawing.caption, "note")]


def _scaled_image(png: bytes, width: float, height: float) -> Any:
    scale = min(1.0, 0.8 * TEXT_HEIGHT_PT / height)
    return ImageFlowable(io.BytesIO(png), width * scale, height * scale, hAlign="LEFT")


def _full_width_image(png: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        width, height = image.size
    return _scaled_image(png, TEXT_WIDTH_PT, TEXT_WIDTH_PT * height / width)


def _build_table(table: TableBlock, width: float, use_large_text: bool = False) -> Any:
    shares = table.column_shares or [1 / len(table.columns)] * len(table.columns)
    titles = [make_paragraph(column.title, "number_head" if column.is_numeric else "head") for column in table.columns]
    header_rows = [titles] if any(column.title for column in table.columns) else []
    rows = [
        [
            _build_cell(cell, column, not column_index, use_large_text)
            for column_index, (cell, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        for row in table.rows
    ]
    padding = 5 if use_large_text else 2.5
    style = [
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
        ("LINEBELOW", (0, 0), (-1, -1), 0.4, RULE_COLOR),
        ("LEFTPADDING", (0, 0), (0, -1), 0),
        ("LEFTPADDING", (1, 0), (-1, -1), 5),
        ("RIGHTPADDING", (0, 0), (-1, -1), 3),
        ("TOPPADDING", (0, 0), (-1, -1), padding),
        ("BOTTOMPADDING", (0, 0), (-1, -1), padding + 0.5),
    ]
    return Table(
        header_rows + rows, [share * width for share in shares], repeatRows=len(header_rows), style=style, hAlign="LEFT"
    )


def _build_cell(cell: TableCell, column: TableColumn, is_first: bool, use_large_text: bool) -> Any:
    value, note = (cell, "") if isinstance(cell, str) else cell
    style = "number" if column.is_numeric else "strong" if is_first else "cell"
    main_paragraph = make_paragraph(value, f"large_{style}" if use_large_text else style)
    return [main_paragraph, make_paragraph(note, "note")] if note else main_paragraph


def _build_tiles(tiles: Sequence[tuple[str, TableCell]]) -> Any:
    def build_tile(label: str, cell: TableCell) -> list[Any]:
        value, note = (cell, "") if isinstance(cell, str) else cell
        return [
            make_paragraph(label, "note"),
            make_paragraph(value, "tile"),
            *([make_paragraph(note, "note")] if note else []),
        ]

    style = [
        ("BACKGROUND", (0, 0), (-1, -1), TILE_COLOR),
        ("VALIGN", (0, 0), (-1, -1), "TOP"),
        ("INNERGRID", (0, 0), (-1, -1), 3, WHITE_COLOR),
        ("TOPPADDING", (0, 0), (-1, -1), 4),
    ]
    return Table(
        [[build_tile(label, cell) for label, cell in tiles]],
        [TEXT_WIDTH_PT / len(tiles)] * len(tiles),
        style=style,
        hAlign="LEFT",
    )


def _notice_style() -> list[Any]:
    return [("LINEBEFORE", (0, 0), (0, -1), 3, WARNING_COLOR), ("BACKGROUND", (0, 0), (-1, -1), NOTICE_COLOR)]


# Fonts, colours, paragraph styles and text that is safe to print

MUTED_COLOR, RULE_COLOR, ACCENT_COLOR, WARNING_COLOR, TILE_COLOR, WHITE_COLOR, NOTICE_COLOR = map(
    HexColor, ("#5b6675", "#d3d8de", "#2f6aa8", "#8a4b00", "#f3f5f8", "#ffffff", "#fff4e0")
)
FONT_FILES = {"Body": "DejaVuSans.ttf", "Body-Bold": "DejaVuSans-Bold.ttf"}


def make_paragraph(text: str, style: str) -> Any:
    return Paragraph(escape_markup(text), paragraph_style(style))


def escape_markup(text: str) -> str:
    """Text without markup and without characters that the font lacks."""
    return replace_missing_glyphs(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def replace_missing_glyphs(text: str) -> str:
    """Replaces every character that the font lacks by its code point, `[U+1F600]`."""
    glyphs: Mapping[int, int] = pdfmetrics.getFont(register_font("Body")).face.charToGlyph
    return "".join(character if ord(character) in glyphs else f"[U+{ord(character):04X}]" for character in text)


def truncate_text(text: str, length: int) -> str:
    printable_text = replace_missing_glyphs(text)
    return printable_text if len(printable_text) <= length else printable_text[: length - 1] + "…"


@cache
def register_font(name: str) -> str:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    pdfmetrics.registerFont(TTFont(f"Hemofed-{name}", str(folder / FONT_FILES[name])))
    return f"Hemofed-{name}"


@cache
def paragraph_style(name: str) -> Any:
    base_name = name.removeprefix("large_")
    sizes = {"title": 15.0, "heading": 11.5, "tile": 11.0, "note": 6.9, "head": 7.0, "number_head": 7.0}
    size = sizes.get(base_name, 9.0 if base_name != name else 8.0)
    colors = {
        "note": MUTED_COLOR,
        "head": MUTED_COLOR,
        "number_head": MUTED_COLOR,
        "heading": ACCENT_COLOR,
        "warn": WARNING_COLOR,
    }
    return ParagraphStyle(
        name,
        fontName=register_font("Body-Bold" if base_name in ("title", "heading", "tile", "strong") else "Body"),
        fontSize=size,
        leading=1.36 * size,
        textColor=colors.get(base_name, HexColor(INK_COLOR)),
        alignment=2 if base_name.startswith("number") else 0,
        spaceBefore=4 if base_name == "heading" else 0,
        spaceAfter={"heading": 4, "body": 5, "note": 2}.get(base_name, 0),
    )
