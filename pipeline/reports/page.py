"""One HTML page that stands alone: no network, no script, light and dark, narrow and wide, on screen and paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

Block = Mapping[str, Any]
MANY_ROWS = 12


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = False


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

    def tiles(self, tiles: Sequence[tuple[str, str]]) -> Page:
        return self._add(kind="tiles", tiles=tiles)

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
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

    here = files("pipeline.reports")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = Markup(here.joinpath("page.css").read_text("utf-8"))
    return environment.from_string(here.joinpath("page.html").read_text("utf-8"), globals={"style": style})
