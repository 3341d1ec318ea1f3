"""Accessibility of every page: keyboard, screen reader, phone, dark mode, print; and rules for the sources."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from tests.support.browser.axe import find_violations_by_layout
from tests.support.dashboard.demo_data import OFFERED, PRIVATE, SLOW, TREE
from tests.support.dashboard.fake_api import WEB_FOLDER

PAGES = [
    "#/",
    f"#/runs/{SLOW}",
    f"#/runs/{TREE}",
    f"#/runs/{PRIVATE}",
    f"#/runs/{OFFERED}",
    "#/sites",
    "#/users",
    "#/log",
    "#/offer",
]
CONTROLS = "a[href], button, input, select, textarea, summary"
UNNAMED_CONTROLS = """(selector) => [...document.querySelectorAll(selector)].filter((node) => {
  const label = node.labels?.[0]?.textContent || node.getAttribute("aria-label") || (node.matches("input, select, textarea") ? "" : node.textContent);
  return !label.trim();
}).map((node) => node.outerHTML)"""
TEXT_COLORS = {  # background -> text colours on it
    "ground": ("ink", "quiet", "accent"),
    "sheet": ("ink", "quiet", "accent", "bad", "good", *(f"c{n}" for n in range(8))),
}
PAGE_WIDTH = """Math.max(document.documentElement.scrollWidth,
  ...[...document.querySelectorAll("main button, main .button")].map((n) => n.getBoundingClientRect().right))"""
COLOR_PAIRS = (
    [(color, background) for background, colors in TEXT_COLORS.items() for color in colors]
    + [(tone, f"{tone}-ground") for tone in ("good", "busy", "warn", "bad", "neutral")]
    + [("on-accent", "accent")]
)


def visit_all_pages(page) -> Iterator[str]:
    """Goes to one page after the other in the same window; yields the address of each after it is drawn."""
    for hash in PAGES:
        heading = page.query_selector("h1")
        page.evaluate("(hash) => { location.hash = hash; }", hash)
        heading.wait_for_element_state("hidden") if hash != PAGES[0] else None
        page.wait_for_selector("h1")
        page.wait_for_timeout(250)
        yield hash


def test_pages_have_landmarks_ordered_headings_and_named_controls(open_page):
    page = open_page()
    for hash in visit_all_pages(page):
        assert_valid_structure(page)
        assert page.evaluate(UNNAMED_CONTROLS, CONTROLS) == [], hash


def test_axe_finds_no_violation_on_any_page(open_page):
    page = open_page()
    found = {hash: find_violations_by_layout(page) for hash in visit_all_pages(page)}
    assert {hash: violations for hash, violations in found.items() if violations} == {}


def test_axe_finds_no_violation_on_the_login_page_and_in_a_dialog(open_page):
    assert find_violations_by_layout(open_page("#/", None)) == {}
    page = open_page(f"#/runs/{SLOW}")
    page.click("#do-stop")
    page.wait_for_selector("dialog[open]")
    assert find_violations_by_layout(page) == {}


def assert_valid_structure(page) -> None:
    assert page.locator("main").count() == page.locator("h1").count() == page.locator("nav[aria-label]").count() == 1
    levels = [
        int(tag[1]) for tag in page.eval_on_selector_all("h1, h2, h3, h4", "nodes => nodes.map((n) => n.tagName)")
    ]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = page.eval_on_selector_all("[id]", "nodes => nodes.map((n) => n.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("table:not(:has(caption))").count() == page.locator("th:not([scope])").count() == 0
    assert page.locator("svg[role=img]:not([aria-label]):not(:has(title)), svg:not([role])").count() == 0
    assert page.locator("section:not([aria-labelledby])").count() == 0


@pytest.mark.parametrize("hash", [f"#/runs/{SLOW}", "#/sites", "#/offer"])
def test_tab_key_reaches_every_control_with_a_visible_focus(open_page, hash):
    page = open_page(hash)
    page.wait_for_timeout(200)
    page.evaluate(f"document.querySelectorAll('{CONTROLS}').forEach((node, index) => node.dataset.index = index)")
    visible = page.eval_on_selector_all(
        CONTROLS, "all => all.filter((n) => n.checkVisibility()).map((n) => n.dataset.index)"
    )
    reached, without_outline = set(), []
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    for _ in range(3 * len(visible)):
        page.keyboard.press("Tab")
        index, outline = page.evaluate(
            "[document.activeElement.dataset.index, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(index)
        if index is not None and outline == "none":
            without_outline.append(index)
    assert set(visible) <= reached
    assert without_outline == []


def test_skip_link_moves_focus_to_main_and_keeps_the_address(open_page):
    page = open_page("#/sites")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#/sites")


def test_navigation_moves_focus_to_the_heading_and_sets_the_title(open_page):
    page = open_page()
    page.click("text=moons-private")
    page.wait_for_selector("h1 >> text=moons-private")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    assert page.title() == "moons-private · hemofed"


def test_dialog_traps_focus_and_returns_it(open_page):
    page = open_page(f"#/runs/{SLOW}")
    page.focus("#do-stop")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    for _ in range(6):
        page.keyboard.press("Tab")
        inside = "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
        assert page.evaluate(inside)  # the browser's own frame is one of the stops
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("document.activeElement.id") == "do-stop"


def test_live_updates_keep_the_focus(open_page, fake_api):
    page = open_page(f"#/runs/{SLOW}")
    page.focus("#do-pause")
    fake_api.add_round(SLOW)
    page.wait_for_selector(".tiles >> text=22 of 30")
    assert page.evaluate("document.activeElement.id") == "do-pause"


def test_no_horizontal_scrolling_on_a_phone(open_page):
    page = open_page(width=360)
    width_by_page = {hash: page.evaluate(PAGE_WIDTH) for hash in visit_all_pages(page)}
    assert max(width_by_page.values()) <= 360, width_by_page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_colors_have_enough_contrast(open_page, scheme):
    page = open_page(color_scheme=scheme)
    names = sorted({name for pair in COLOR_PAIRS for name in pair})
    read_colors = (
        "(names) => names.map((n) => getComputedStyle(document.documentElement).getPropertyValue(`--${n}`).trim())"
    )
    colors = dict(zip(names, page.evaluate(read_colors, names), strict=True))
    ratios = {pair: contrast_ratio(colors[pair[0]], colors[pair[1]]) for pair in COLOR_PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    edge, sheet = page.evaluate(read_colors, ["edge", "sheet"])
    assert contrast_ratio(edge, sheet) >= 3  # borders of fields


def test_print_shows_the_run_without_bar_and_dark_colors(open_page):
    page = open_page(f"#/runs/{TREE}", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("#bar").is_hidden()
    assert page.locator("#result-table").is_visible()
    ink = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')").strip()
    assert ink == "#000"


def contrast_ratio(color: str, other: str) -> float:
    """WCAG 2: 1 to 21."""
    light, dark = sorted(map(luminance, (color, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    match = re.fullmatch(r"#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})", color)
    assert match, color
    channels = [int(channel, 16) / 255 for channel in match.groups()]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_ratio_matches_wcag():
    assert contrast_ratio("#000000", "#ffffff") == pytest.approx(21)
    assert contrast_ratio("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("file", sorted(WEB_FOLDER.glob("*.js")), ids=lambda file: file.name)
def test_sources_are_short_and_never_parse_data_as_html(file):
    text = file.read_text("utf-8")
    assert text.startswith("// ")
    assert len(text.splitlines()) < 200
    for unsafe in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        'setAttribute("style"',
    ):
        assert unsafe not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
