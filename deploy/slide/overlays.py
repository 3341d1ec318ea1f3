"""Pictures for a person: cells boxed in their fields, and the most suspicious ones side by side. Pillow alone."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from deploy.slide.prevalence import NOTICE
from deploy.slide.reader import Reading

Pixels = NDArray[np.uint8]
# of cells that are flagged, counted, answered for by nobody, set apart; told apart also by their shape's line
FLAGGED, COUNTED, REFUSED, APART = (208, 32, 44), (28, 110, 164), (214, 134, 0), (120, 120, 120)
BAND = 18  # pixels of the line of words
TILE, ACROSS = 96, 8


def colour(cell_flagged: bool, counted: bool, kind: str) -> tuple[int, int, int]:
    if cell_flagged:
        return FLAGGED
    return COUNTED if counted else REFUSED if kind == "red" else APART


def overlay(pixels: Pixels, reading: Reading) -> Pixels:
    """The field with every cell boxed, and a line below that says what this is."""
    height, width = pixels.shape[:2]
    canvas = Image.new("RGB", (width, height + BAND), "white")
    canvas.paste(Image.fromarray(pixels), (0, 0))
    pen = ImageDraw.Draw(canvas)
    bold = max(1, round(min(height, width) / 400))
    for cell in sorted(reading.cells, key=lambda c: c.flagged):
        x0, y0, x1, y1 = cell.box
        shade = colour(cell.flagged, cell.counted, cell.kind)
        pen.rectangle((x0, y0, x1 - 1, y1 - 1), outline=shade, width=bold * (2 if cell.flagged else 1))
        if cell.flagged and cell.probability is not None:
            pen.text((x0 + 2, max(0, y0 - 11)), f"{cell.probability:.2f}", fill=shade, font=_font())
    counted = sum(cell.counted for cell in reading.cells)
    flagged = sum(cell.flagged for cell in reading.cells)
    words = f"{flagged} flagged of {counted} counted ({len(reading.cells)} found) - {NOTICE}"
    pen.text((4, height + 3), words, fill="black", font=_font())
    return np.asarray(canvas)


@dataclass
class Gallery:
    """The most suspicious cells so far: fields need not stay in memory."""

    most: int = 24
    _kept: list[tuple[float, int, Pixels, str]] = field(default_factory=list)
    _seen: int = 0

    def look(self, pixels: Pixels, reading: Reading) -> None:
        for cell in reading.cells:
            if not cell.counted or cell.probability is None:
                continue
            self._seen += 1
            if len(self._kept) == self.most and cell.probability <= self._kept[0][0]:
                continue
            entry = (cell.probability, -self._seen, tile(pixels, cell.box), "flagged" if cell.flagged else "")
            (heapq.heappush if len(self._kept) < self.most else heapq.heappushpop)(self._kept, entry)

    def montage(self) -> Pixels | None:
        """Most suspicious first; None where nothing was counted."""
        best = sorted(self._kept, key=lambda entry: (-entry[0], -entry[1]))
        return (
            _side_by_side([(picture, f"{p:.2f} {mark}", bool(mark)) for p, _, picture, mark in best]) if best else None
        )


def tile(pixels: Pixels, box: tuple[int, int, int, int]) -> Pixels:
    """A square about a box, half as large again, as a tile."""
    x0, y0, x1, y1 = box
    side = round(1.5 * max(x1 - x0, y1 - y0, 4))
    left, top = (x0 + x1 - side) // 2, (y0 + y1 - side) // 2
    height, width = pixels.shape[:2]
    part = pixels[max(0, top) : max(1, min(height, top + side)), max(0, left) : max(1, min(width, left + side))]
    canvas = Image.new("RGB", (side, side), (230, 230, 230))
    canvas.paste(Image.fromarray(np.ascontiguousarray(part)), (max(0, -left), max(0, -top)))
    return np.asarray(canvas.resize((TILE, TILE), Image.Resampling.BICUBIC))


def _side_by_side(tiles: Sequence[tuple[Pixels, str, bool]]) -> Pixels:
    rows = -(-len(tiles) // ACROSS)
    canvas = Image.new("RGB", (min(ACROSS, len(tiles)) * (TILE + 4) + 4, rows * (TILE + BAND + 4) + BAND + 4), "white")
    canvas = canvas if canvas.width >= 320 else canvas.resize((320, canvas.height))
    pen = ImageDraw.Draw(canvas)
    pen.rectangle((0, 0, canvas.width, canvas.height), fill="white")
    for n, (pixels, words, marked) in enumerate(tiles):
        x, y = 4 + n % ACROSS * (TILE + 4), 4 + n // ACROSS * (TILE + BAND + 4)
        canvas.paste(Image.fromarray(pixels), (x, y))
        if marked:
            pen.rectangle((x, y, x + TILE - 1, y + TILE - 1), outline=FLAGGED, width=2)
        pen.text((x + 2, y + TILE + 2), words, fill=FLAGGED if marked else "black", font=_font())
    pen.text((4, canvas.height - BAND + 2), f"most suspicious first - {NOTICE}", fill="black", font=_font())
    return np.asarray(canvas)


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(11)
