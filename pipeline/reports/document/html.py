"""Renders a ReportDocument as one self-contained HTML page."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.reports.document.blocks import (
    FigureBlock,
    ImageBlock,
    ReportBlock,
    ReportDocument,
    TableBlock,
    TextBlock,
    TileBlock,
)
from pipeline.reports.document.figure_style import HALF_WIDTH_INCHES, to_svg
from pipeline.reports.document.page import CaptionedImage, HtmlPage, TableCell

MIN_BREAKABLE_LETTERS = 70  # longer than a hash


def write_html(report: ReportDocument, path: Path) -> Path:
    page = HtmlPage(report.title, report.subtitle, _breakable_text(report.notice))
    for chapter in report.chapters:
        page.add_section(chapter.title)
        for block in chapter.blocks:
            _add_block(page, block)
    return page.save(path)


def _add_block(page: HtmlPage, block: ReportBlock) -> None:
    match block:
        case TextBlock(paragraphs):
            page.add_text(*map(_breakable_text, paragraphs))
        case TileBlock(tiles):
            page.add_tiles(tiles)
        case TableBlock():
            page.add_table(
                block.columns,
                [[_breakable_cell(cell) for cell in row] for row in block.rows],
                _breakable_text(block.caption),
            )
        case FigureBlock(key, figure, caption):
            page.add_figure(
                to_svg(figure, key), _breakable_text(caption), wide=figure.get_figwidth() > HALF_WIDTH_INCHES[0]
            )
        case ImageBlock(title, png, note):
            page.add_images([CaptionedImage(title, png, alt=note or title, note=note)])


def _breakable_cell(cell: TableCell) -> TableCell:
    return _breakable_text(cell) if isinstance(cell, str) else (_breakable_text(cell[0]), _breakable_text(cell[1]))


def _breakable_text(text: str) -> str:
    """Allows line breaks inside very long words; a hash stays whole, so that it can be copied."""
    return re.sub(
        rf"\S{{{MIN_BREAKABLE_LETTERS},}}", lambda match: "\u200b".join(re.findall(".{1,20}", match[0])), text
    )
