"""Images for a person, drawn with Pillow: fields with their cells boxed, and a montage of the most suspicious cells."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.slide.image_result import ImageResult

RgbImage = NDArray[np.uint8]

FLAGGED_COLOR, COUNTED_COLOR, REJECTED_COLOR, EXCLUDED_COLOR = (
    (208, 32, 44),
    (28, 110, 164),
    (214, 134, 0),
    (120, 120, 120),
)
CAPTION_HEIGHT_PX = 18
TILE_SIZE_PX, TILES_PER_ROW = 96, 8


def box_color(is_flagged: bool, is_counted: bool, kind: str) -> tuple[int, int, int]:
    if is_flagged:
        return FLAGGED_COLOR
    return COUNTED_COLOR if is_counted else REJECTED_COLOR if kind == "red" else EXCLUDED_COLOR


def draw_overlay(pixels: RgbImage, image_result: ImageResult) -> RgbImage:
    """The field with every cell boxed, and a caption with the counts and the research notice below."""
    height, width = pixels.shape[:2]
    canvas = Image.new("RGB", (width, height + CAPTION_HEIGHT_PX), "white")
    canvas.paste(Image.fromarray(pixels), (0, 0))
    draw = ImageDraw.Draw(canvas)
    line_width = max(1, round(min(height, width) / 400))
    for cell in sorted(image_result.cells, key=lambda c: c.is_flagged):
        x0, y0, x1, y1 = cell.box
        color = box_color(cell.is_flagged, cell.is_counted, cell.kind)
        draw.rectangle((x0, y0, x1 - 1, y1 - 1), outline=color, width=line_width * (2 if cell.is_flagged else 1))
        if cell.is_flagged and cell.probability is not None:
            draw.text((x0 + 2, max(0, y0 - 11)), f"{cell.probability:.2f}", fill=color, font=_load_font())
    caption = (
        f"{image_result.num_flagged} flagged of {image_result.num_counted} counted ({len(image_result.cells)} found)"
        f" - {RESEARCH_USE_NOTICE}"
    )
    draw.text((4, height + 3), caption, fill="black", font=_load_font())
    return np.asarray(canvas)


@dataclass
class CellGallery:
    """Tiles of the most suspicious cells so far, so that fields do not stay in memory."""

    max_tiles: int = 24
    _entries: list[tuple[float, int, RgbImage, str]] = field(default_factory=list)
    _num_seen: int = 0

    def add_cells(self, pixels: RgbImage, image_result: ImageResult) -> None:
        for cell in image_result.cells:
            if not cell.is_counted or cell.probability is None:
                continue
            self._num_seen += 1
            if len(self._entries) == self.max_tiles and cell.probability <= self._entries[0][0]:
                continue
            entry = (
                cell.probability,
                -self._num_seen,
                crop_tile(pixels, cell.box),
                "flagged" if cell.is_flagged else "",
            )
            (heapq.heappush if len(self._entries) < self.max_tiles else heapq.heappushpop)(self._entries, entry)

    def render_montage(self) -> RgbImage | None:
        """Most suspicious first; None if no cell was counted."""
        entries = sorted(self._entries, key=lambda entry: (-entry[0], -entry[1]))
        return (
            _compose_montage(
                [(tile_pixels, f"{p:.2f} {flag_text}", bool(flag_text)) for p, _, tile_pixels, flag_text in entries]
            )
            if entries
            else None
        )


def crop_tile(pixels: RgbImage, box: tuple[int, int, int, int]) -> RgbImage:
    """A square tile around a box, 1.5 times its longer side."""
    x0, y0, x1, y1 = box
    side = round(1.5 * max(x1 - x0, y1 - y0, 4))
    left, top = (x0 + x1 - side) // 2, (y0 + y1 - side) // 2
    height, width = pixels.shape[:2]
    patch = pixels[max(0, top) : max(1, min(height, top + side)), max(0, left) : max(1, min(width, left + side))]
    canvas = Image.new("RGB", (side, side), (230, 230, 230))
    canvas.paste(Image.fromarray(np.ascontiguousarray(patch)), (max(0, -left), max(0, -top)))
    return np.asarray(canvas.resize((TILE_SIZE_PX, TILE_SIZE_PX), Image.Resampling.BICUBIC))


def _compose_montage(tiles: Sequence[tuple[RgbImage, str, bool]]) -> RgbImage:
    rows = -(-len(tiles) // TILES_PER_ROW)
    canvas = Image.new(
        "RGB",
        (
            min(TILES_PER_ROW, len(tiles)) * (TILE_SIZE_PX + 4) + 4,
            rows * (TILE_SIZE_PX + CAPTION_HEIGHT_PX + 4) + CAPTION_HEIGHT_PX + 4,
        ),
        "white",
    )
    canvas = canvas if canvas.width >= 320 else canvas.resize((320, canvas.height))
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((0, 0, canvas.width, canvas.height), fill="white")
    for n, (pixels, caption, is_flagged) in enumerate(tiles):
        x, y = (
            4 + n % TILES_PER_ROW * (TILE_SIZE_PX + 4),
            4 + n // TILES_PER_ROW * (TILE_SIZE_PX + CAPTION_HEIGHT_PX + 4),
        )
        canvas.paste(Image.fromarray(pixels), (x, y))
        if is_flagged:
            draw.rectangle((x, y, x + TILE_SIZE_PX - 1, y + TILE_SIZE_PX - 1), outline=FLAGGED_COLOR, width=2)
        draw.text(
            (x + 2, y + TILE_SIZE_PX + 2), caption, fill=FLAGGED_COLOR if is_flagged else "black", font=_load_font()
        )
    draw.text(
        (4, canvas.height - CAPTION_HEIGHT_PX + 2),
        f"most suspicious first - {RESEARCH_USE_NOTICE}",
        fill="black",
        font=_load_font(),
    )
    return np.asarray(canvas)


def _load_font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(11)
