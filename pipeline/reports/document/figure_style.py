"""The style of all figures, and their two formats: inline SVG that follows the page's theme, and PNG for papers.

Everything except data is drawn in INK_COLOR. The SVG replaces it by `currentColor`, so the same figure is readable on
a light and on a dark page. Data colours are mid-tones that are readable on both.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.files import write_atomically

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

INK_COLOR = "#1b2431"
PALETTE = (
    "#3f7fc1", "#e08a2e", "#3f9e6d", "#c9505f", "#8a6cc4", "#2fa0b0",
    "#b3873c", "#d274a8", "#7d8a97", "#8fae3a", "#5d6fd6", "#a65d3a",
)  # fmt: skip
HALF_WIDTH_INCHES = (5.2, 3.5)  # two figures side by side on a wide page
FULL_WIDTH_INCHES = (10.6, 3.7)
FILE_DPI, PRINT_DPI = 150, 200  # of a saved PNG, and of one in a PDF

MATPLOTLIB_STYLE: Mapping[str, Any] = {
    "axes.edgecolor": INK_COLOR,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK_COLOR,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": INK_COLOR,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "patch.linewidth": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "hemofed",
    "text.color": INK_COLOR,
    "text.parse_math": False,  # a site may have the name "$1"
    "xtick.color": INK_COLOR,
    "ytick.color": INK_COLOR,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


@contextmanager
def apply_figure_style() -> Iterator[None]:
    """Sets the style; also usable as a decorator. matplotlib reads it when an artist is created and when it is drawn."""
    import matplotlib

    with matplotlib.rc_context(dict(MATPLOTLIB_STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser has fonts for them
        yield


def new_figure(size: tuple[float, float] = HALF_WIDTH_INCHES) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


@apply_figure_style()
def to_svg(figure: Figure, key: str) -> Markup:
    """Inline SVG. `key` is unique on the page and prefixes the figure's ids, so that they do not collide."""
    from markupsafe import Markup

    empty_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=empty_metadata)
    svg_text = buffer.getvalue()
    view_box = re.search(r'viewBox="[^"]*"', svg_text)
    opening_end = svg_text.index(">", svg_text.index("<svg")) + 1
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg_text[opening_end:], count=1, flags=re.DOTALL)
    used_ids = {url_id or href_id for url_id, href_id in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', body)}
    body = re.sub(
        r"<[^>]*>", lambda tag: _adapt_svg_tag(tag[0], key, used_ids), body
    )  # tags only: site and class names stay as written
    return Markup(f'<svg {view_box[0] if view_box else ""} aria-hidden="true">{body}')


def save_png(figure: Figure, path: Path) -> Path:
    return write_atomically(path, render_png(figure, FILE_DPI))


def _adapt_svg_tag(tag: str, key: str, used_ids: set[str]) -> str:
    tag = re.sub(
        r' id="([^"]*)"', lambda id_match: f' id="{key}-{id_match[1]}"' if id_match[1] in used_ids else "", tag
    )
    tag = re.sub(r"url\(#", f"url(#{key}-", tag).replace('xlink:href="#', f'href="#{key}-')
    tag = tag.replace("xlink:href=", "href=")
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)  # the page's own fonts
    tag = re.sub(r"font: (?:normal )*(?:(bold|\d{3}) )?([\d.]+)px [^;\"]*", r"font-size: \2px", tag)
    return re.sub(rf"((?:fill|stroke): ?){INK_COLOR}", r"\1currentColor", tag)


def render_png(figure: Figure, dpi: int = PRINT_DPI) -> bytes:
    buffer = io.BytesIO()
    with apply_figure_style():
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
