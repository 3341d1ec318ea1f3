"""One HTML page that stands alone: no network, no script, light and dark, narrow and wide, on screen and paper."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.files import write_atomically
from pipeline.reports.document.figure_style import HALF, PALETTE, save_png, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

Block = Mapping[str, Any]
Cell = str | tuple[str, str]  # (value, note): the note stands small below it
MANY_ROWS = 12


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = False
    words: bool = False  # sentences, which need their width on a narrow page too


@dataclass(frozen=True)
class Bar:
    """Counts side by side, as long as their shares; colours go by place."""

    label: str
    parts: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Picture:
    """A captioned image, or only its words where there is none to show."""

    title: str
    png: bytes | None = None
    alt: str = ""
    words: Sequence[str] = ()
    note: str = ""
    colour: tuple[int, int, int] | None = None  # a swatch, 0 to 255
    colour_words: str = ""
    bars: Sequence[Bar] = ()

    @property
    def source(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.png or b'').decode()}"


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


class Page:
    """Sections of blocks, top to bottom. All text is escaped; only an SVG (Markup) is taken as it is."""

    def __init__(self, title: str, subtitle: str = "", notice: str = "") -> None:
        self.title, self.subtitle, self.notice = title, subtitle, notice
        self.sections = [Section("")]

    def section(self, title: str) -> Page:
        self.sections.append(Section(title))
        return self

    def text(self, *paragraphs: str) -> Page:
        return self._add(kind="text", paragraphs=paragraphs)

    def tiles(self, tiles: Sequence[tuple[str, Cell]], lead: bool = False) -> Page:
        return self._add(kind="tiles", tiles=tiles, lead=lead)

    def findings(self, findings: Sequence[str]) -> Page:
        return self._add(kind="findings", findings=findings)

    def pictures(self, pictures: Sequence[Picture]) -> Page:
        return self._add(kind="pictures", pictures=pictures)

    def legend(self, names: Sequence[str]) -> Page:
        """What the colours of bars stand for."""
        return self._add(kind="legend", names=names)

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Cell]],
        caption: str = "",
        highlight: int | None = None,
        badge: str = "",
    ) -> Page:
        """The first cell of a row heads it; the highlighted row also says why (`badge`), not by colour alone.

        A captioned table of many rows starts folded, unless it has a highlight to show.
        """
        fold = bool(caption) and highlight is None and len(rows) > MANY_ROWS
        table = {"columns": columns, "rows": rows, "caption": caption, "highlight": highlight, "badge": badge}
        return self._add(kind="table", fold=fold, **table)

    def figure(self, svg: Markup, caption: str, alt: str = "", wide: bool = False) -> Page:
        return self._add(kind="figure", svg=svg, caption=caption, alt=alt or caption, wide=wide)

    def details(self, summary: str, text: str) -> Page:
        return self._add(kind="details", summary=summary, preformatted=text)

    def html(self) -> str:
        sections = [section for section in self.sections if section.blocks]
        return _template().render(title=self.title, subtitle=self.subtitle, notice=self.notice, sections=sections)

    def save(self, path: Path) -> Path:
        return write_atomically(path, self.html().encode())

    def _add(self, **block: Any) -> Page:
        self.sections[-1].blocks.append(block)
        return self


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = files("pipeline.reports.document")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = Markup(here.joinpath("page.css").read_text("utf-8"))
    return environment.from_string(
        here.joinpath("page.html").read_text("utf-8"), globals={"style": style, "palette": PALETTE}
    )


# A page whose figures are also saved as pictures, and the words that its sections share.

COORDINATOR = "Coordinator's set"
POOLED = "All sites, pooled"


@dataclass(frozen=True)
class Sheet:
    page: Page
    plots: Path

    def draw(self, key: str, figure: Figure, caption: str) -> None:
        save_png(figure, self.plots / f"{key}.png")
        self.page.figure(to_svg(figure, key), caption, wide=figure.get_figwidth() > HALF[0])
