"""Small images side by side, each with its name, inside a page: they wrap with its width and need no network."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

SIDE = 96  # pixels of a stored image
PLAIN = 40  # pixels up to which JPEG would show

Pixels = NDArray[np.uint8]  # (C, H, W)


@dataclass(frozen=True)
class Tile:
    """One image, or several of the same size beside each other; `name` shows up when pointed at."""

    images: Sequence[Pixels]
    name: str
    words: str = ""  # stand below


def gallery(title: str, tiles: Sequence[Tile], shown: int) -> Markup:
    """`shown`: pixels a side on the page."""
    spans = Markup("").join(_span(tile, shown) for tile in tiles)
    head = Markup('<strong style="display:block;margin-bottom:.4rem">{}</strong>').format(title)
    return head + Markup('<div style="display:flex;flex-wrap:wrap;gap:{}px;padding:1px">{}</div>').format(
        14 if _worded(tiles) else 3, spans
    )


def _worded(tiles: Sequence[Tile]) -> bool:
    return any(tile.words for tile in tiles)


def _span(tile: Tile, shown: int) -> Markup:
    image = Markup(
        '<img src="{}" alt="{}" height="{}" style="display:inline-block;border-radius:3px;outline:1px solid var(--line);{}">'
    )
    crisp = "image-rendering:pixelated;" if max(tile.images[0].shape[1:]) <= PLAIN else ""
    drawn = Markup("&thinsp;").join(image.format(_source(one), tile.name, shown, crisp) for one in tile.images)
    width = shown * len(tile.images) + 8
    small = "display:block;font-size:.72rem;line-height:1.3;overflow-wrap:anywhere"
    words = Markup("").join(
        Markup('<span style="{}">{}</span>').format(small, escape(line)) for line in tile.words.splitlines()
    )
    limits = f"max-width:{max(width, 110)}px" if tile.words else ""
    return Markup('<span title="{}" style="display:inline-block;{}">{}{}</span>').format(
        tile.name, limits, drawn, words
    )


def _source(pixels: Pixels) -> str:
    from PIL import Image

    array: NDArray[Any] = pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(array))
    image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    buffer = io.BytesIO()
    kind = "PNG" if max(image.size) <= PLAIN else "JPEG"
    image.save(buffer, kind, **({"quality": 88} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
