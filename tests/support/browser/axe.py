"""Checks pages in the browser with axe-core, the accessibility checker; `make system` installs it with npm."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

AXE_FILE = Path(sys.prefix) / "axe/node_modules/axe-core/axe.min.js"
LAYOUTS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]
RUN_AXE = """async () => {
  // observers of sizes act after the next frame
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const { violations } = await axe.run({ resultTypes: ["violations"], preload: false });
  return violations.flatMap(({ id, help, nodes }) => nodes.map((node) => `${id} (${help}): ${node.html}`));
}"""


@cache
def _read_axe() -> str:
    if not AXE_FILE.is_file():
        pytest.skip("axe-core is not installed: install npm, then run `make system`")
    return AXE_FILE.read_text("utf-8")


def find_violations(page: Any) -> list[str]:
    """Elements of the shown page that break a rule of axe-core, best practices included; folded parts are opened."""
    page.evaluate(_read_axe() + "; undefined")
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    violations: list[str] = page.evaluate(RUN_AXE)
    return violations


def find_violations_by_layout(page: Any) -> dict[tuple[str, int], list[str]]:
    """Violations with light and dark colors, on a desktop and on a phone; only layouts that have some."""
    found = {}
    for scheme, width in LAYOUTS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        found[scheme, width] = find_violations(page)
    return {layout: violations for layout, violations in found.items() if violations}


def find_violations_of_file(browser: Any, path: Path) -> dict[tuple[str, int], list[str]]:
    page = browser.new_page()
    page.goto(path.resolve().as_uri())
    try:
        return find_violations_by_layout(page)
    finally:
        page.close()
