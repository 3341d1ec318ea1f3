"""An audit as one HTML page that stands alone."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.reports.document.blocks import Block, Drawing, Photo, Report, Table, Tiles, Words
from pipeline.reports.document.figure_style import HALF, to_svg
from pipeline.reports.document.page import Cell, Page, Picture

LONG = 70  # letters, more than a hash has


def write_page(report: Report, path: Path) -> Path:
    page = Page(report.title, report.subtitle, _soft(report.notice))
    for chapter in report.chapters:
        page.section(chapter.title)
        for block in chapter.blocks:
            _add(page, block)
    return page.save(path)


def _add(page: Page, block: Block) -> None:
    match block:
        case Words(paragraphs):
            page.text(*map(_soft, paragraphs))
        case Tiles(tiles):
            page.tiles(tiles)
        case Table():
            page.table(block.columns, [[_cell(cell) for cell in row] for row in block.rows], _soft(block.caption))
        case Drawing(key, figure, caption):
            page.figure(to_svg(figure, key), _soft(caption), wide=figure.get_figwidth() > HALF[0])
        case Photo(title, png, note):
            page.pictures([Picture(title, png, alt=note or title, note=note)])


def _cell(cell: Cell) -> Cell:
    return _soft(cell) if isinstance(cell, str) else (_soft(cell[0]), _soft(cell[1]))


def _soft(text: str) -> str:
    """Names without end may be broken; a hash stays whole, so that it can be copied."""
    return re.sub(rf"\S{{{LONG},}}", lambda word: "\u200b".join(re.findall(".{1,20}", word[0])), text)
