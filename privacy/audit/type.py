"""Type for the printed audit: fonts that come with matplotlib, a few styles, and text that is safe to print."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from reportlab.lib.colors import HexColor
from reportlab.lib.styles import ParagraphStyle
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.platypus import Paragraph as Lines

from pipeline.reports.svg import INK

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
