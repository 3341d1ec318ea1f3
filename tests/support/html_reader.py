"""Parses an HTML page for assertions on its tags and texts."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser


@dataclass
class HtmlTag:
    name: str
    attributes: dict[str, str]
    text: str = ""


class HtmlReader(HTMLParser):
    """Also asserts that every tag is closed."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[HtmlTag] = []
        self._open: list[HtmlTag] = []
        self.feed(html)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = HtmlTag(tag, {name: value or "" for name, value in attrs})
        self.tags.append(found)
        if tag not in self.VOID:
            self._open.append(found)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(HtmlTag(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].name == tag, f"</{tag}> closes <{self._open[-1].name}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            tag.text += data

    def all(self, name: str) -> list[HtmlTag]:
        return [tag for tag in self.tags if tag.name == name]

    def texts(self, name: str) -> list[str]:
        return [" ".join(tag.text.split()) for tag in self.all(name)]

    def row(self, heading: str) -> str:
        """The table row that starts with this text."""
        return next(text for text in self.texts("tr") if text.startswith(heading))
