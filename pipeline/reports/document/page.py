"""A self-contained HTML page: without network or scripts, for light and dark themes, narrow and wide screens, and print.

`ReportWriter` also saves the page's figures as PNG files.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.files import write_atomically
from pipeline.reports.document.figure_style import HALF_WIDTH_INCHES, PALETTE, save_png, to_svg

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup
    from matplotlib.figure import Figure

PageBlock = Mapping[str, Any]
TableCell = str | tuple[str, str]  # (value, note): the note is shown in small type below the value
MAX_UNFOLDED_ROWS = 12
COORDINATOR_LABEL = "Coordinator's set"
POOLED_LABEL = "All sites, pooled"


@dataclass(frozen=True)
class TableColumn:
    title: str
    is_numeric: bool = False
    is_text: bool = False  # sentences: they keep a minimum width on narrow pages


@dataclass(frozen=True)
class CountBar:
    """Counts side by side; lengths are shares of the total, colours follow the position."""

    label: str
    counts: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class CaptionedImage:
    """An image with its texts, or only the texts if `png` is None."""

    title: str
    png: bytes | None = None
    alt: str = ""
    paragraphs: Sequence[str] = ()
    note: str = ""
    color: tuple[int, int, int] | None = None  # a swatch, 0 to 255
    color_text: str = ""
    bars: Sequence[CountBar] = ()

    @property
    def data_url(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png or b'').decode()}"


@dataclass
class PageSection:
    title: str
    blocks: list[PageBlock] = field(default_factory=list)


class HtmlPage:
    """Sections of blocks, top to bottom. All text is escaped, except SVG given as Markup."""

    def __init__(self, title: str, subtitle: str = "", notice: str = "") -> None:
        self.title, self.subtitle, self.notice = title, subtitle, notice
        self.sections = [PageSection("")]

    def add_section(self, title: str) -> HtmlPage:
        self.sections.append(PageSection(title))
        return self

    def add_text(self, *paragraphs: str) -> HtmlPage:
        return self._add_block(kind="text", paragraphs=paragraphs)

    def add_tiles(self, tiles: Sequence[tuple[str, TableCell]], lead: bool = False) -> HtmlPage:
        return self._add_block(kind="tiles", tiles=tiles, lead=lead)

    def add_findings(self, findings: Sequence[str]) -> HtmlPage:
        return self._add_block(kind="findings", findings=findings)

    def add_images(self, images: Sequence[CaptionedImage]) -> HtmlPage:
        return self._add_block(kind="images", images=images)

    def add_legend(self, names: Sequence[str]) -> HtmlPage:
        """The names that the colours of bars stand for."""
        return self._add_block(kind="legend", names=names)

    def add_table(
        self,
        columns: Sequence[TableColumn],
        rows: Sequence[Sequence[TableCell]],
        caption: str = "",
        highlight: int | None = None,
        badge: str = "",
    ) -> HtmlPage:
        """Adds a table whose first column holds the row headings.

        `highlight`: index of a marked row; `badge` says why it is marked, so that colour is not the only sign.
        A captioned table with more than MAX_UNFOLDED_ROWS rows starts folded, unless it has a highlight.
        """
        fold = bool(caption) and highlight is None and len(rows) > MAX_UNFOLDED_ROWS
        table = {"columns": columns, "rows": rows, "caption": caption, "highlight": highlight, "badge": badge}
        return self._add_block(kind="table", fold=fold, **table)

    def add_figure(self, svg: Markup, caption: str, alt: str = "", wide: bool = False) -> HtmlPage:
        return self._add_block(kind="figure", role="img", svg=svg, caption=caption, alt=alt or caption, wide=wide)

    def add_gallery(self, title: str, images: Markup, caption: str) -> HtmlPage:
        """A wide figure of many images; unlike those of a drawing, its texts are read out."""
        return self._add_block(kind="figure", role="group", svg=images, caption=caption, alt=title, wide=True)

    def add_details(self, summary: str, text: str) -> HtmlPage:
        return self._add_block(kind="details", summary=summary, preformatted=text)

    def render_html(self) -> str:
        sections = [section for section in self.sections if section.blocks]
        return _load_template().render(title=self.title, subtitle=self.subtitle, notice=self.notice, sections=sections)

    def save(self, path: Path) -> Path:
        return write_atomically(path, self.render_html().encode())

    def _add_block(self, **block: Any) -> HtmlPage:
        self.sections[-1].blocks.append(block)
        return self


@cache
def _load_template() -> Template:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    package_files = files("pipeline.reports.document")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = Markup(package_files.joinpath("page.css").read_text("utf-8"))
    return environment.from_string(
        package_files.joinpath("page.html").read_text("utf-8"), globals={"style": style, "palette": PALETTE}
    )


@dataclass(frozen=True)
class ReportWriter:
    """Adds figures to the page and saves each as plots/KEY.png for papers."""

    page: HtmlPage
    plots_folder: Path

    def add_figure(self, key: str, figure: Figure, caption: str) -> None:
        save_png(figure, self.plots_folder / f"{key}.png")
        self.page.add_figure(to_svg(figure, key), caption, wide=figure.get_figwidth() > HALF_WIDTH_INCHES[0])
