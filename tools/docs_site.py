"""Hooks of mkdocs.yml: pages of the repository's root join the site, and links and code blocks are adapted to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {f"{name}.md": f"{name.lower()}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")}
FENCE_WITH_MARKS = re.compile(r"^```(\w+)[ \t]+([^\n]+)$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=_adapt_root_page((ROOT / source).read_text("utf-8"))))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for source, page in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return FENCE_WITH_MARKS.sub(_adapt_fence, markdown)


def _adapt_root_page(markdown: str) -> str:
    """Links as seen from docs/; a link to a file that is not a page becomes its text."""
    markdown = markdown.replace("](docs/", "](").replace('src="docs/', 'src="')
    for source, page in ROOT_PAGES.items():
        markdown = markdown.replace(f"]({source}", f"]({page}")
    return re.sub(r"\[([^\]]+)\]\([A-Z]+(?:\.cff)?\)", r"\1", markdown)


def _adapt_fence(fence: re.Match[str]) -> str:
    """Marks tell tests how to run a block; of these, readers see only the name of the file that it becomes."""
    language, marks = fence[1], fence[2].split()
    files = [mark.removeprefix("file=") for mark in marks if mark.startswith("file=")]
    title = files[0] if files else "study.toml" if marks == ["study"] else ""
    return f"```{language}" + (f' title="{title}"' if title else "")
