"""For everybody: by keyboard, with a screen reader, on a phone, in the dark, on paper."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from tests.support.demo_data import OFFERED, PRIVATE, SLOW, TREE
from tests.support.fake_api import WEB

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
NAMELESS = """(selector) => [...document.querySelectorAll(selector)].filter((node) => {
  const label = node.labels?.[0]?.textContent || node.getAttribute("aria-label") || (node.matches("input, select, textarea") ? "" : node.textContent);
  return !label.trim();
}).map((node) => node.outerHTML)"""
LINEAR = {
    "ground": ("ink", "quiet", "accent"),
    "sheet": ("ink", "quiet", "accent", "bad", "good", *(f"c{n}" for n in range(8))),
}
WIDEST = """Math.max(document.documentElement.scrollWidth,
  ...[...document.querySelectorAll("main button, main .button")].map((n) => n.getBoundingClientRect().right))"""
PAIRS = (
    [(ink, ground) for ground, inks in LINEAR.items() for ink in inks]
    + [(tone, f"{tone}-ground") for tone in ("good", "busy", "warn", "bad", "still")]
    + [("on-accent", "accent")]
)


def each_page(page) -> Iterator[str]:
    """One after the other, drawn, in the same window."""
    for hash in PAGES:
        heading = page.query_selector("h1")
        page.evaluate("(hash) => { location.hash = hash; }", hash)
        heading.wait_for_element_state("hidden") if hash != PAGES[0] else None
        page.wait_for_selector("h1")
        page.wait_for_timeout(250)
        yield hash


def test_every_page_has_landmarks_headings_in_order_and_names(visit):
    page = visit()
    for hash in each_page(page):
        check_structure(page)
        assert page.evaluate(NAMELESS, CONTROLS) == [], hash


def check_structure(page) -> None:
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
def test_the_tabulator_reaches_every_control_visibly(visit, hash):
    page = visit(hash)
    page.wait_for_timeout(200)
    page.evaluate(f"document.querySelectorAll('{CONTROLS}').forEach((node, place) => node.dataset.place = place)")
    seen = page.eval_on_selector_all(
        CONTROLS, "all => all.filter((n) => n.checkVisibility()).map((n) => n.dataset.place)"
    )
    reached, hidden = set(), []
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    for _ in range(3 * len(seen)):
        page.keyboard.press("Tab")
        place, outline = page.evaluate(
            "[document.activeElement.dataset.place, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.add(place)
        if place is not None and outline == "none":
            hidden.append(place)
    assert set(seen) <= reached
    assert hidden == []


def test_the_skip_link_jumps_over_the_bar_and_keeps_the_address(visit):
    page = visit("#/sites")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#/sites")


def test_another_page_begins_at_its_heading_and_says_its_title(visit):
    page = visit()
    page.click("text=moons-private")
    page.wait_for_selector("h1 >> text=moons-private")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    assert page.title() == "moons-private · hemofed"


def test_a_dialog_keeps_the_focus_and_gives_it_back(visit):
    page = visit(f"#/runs/{SLOW}")
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


def test_news_do_not_take_the_focus_away(visit, stage):
    page = visit(f"#/runs/{SLOW}")
    page.focus("#do-pause")
    stage.next_round(SLOW)
    page.wait_for_selector(".tiles >> text=22 of 30")
    assert page.evaluate("document.activeElement.id") == "do-pause"


def test_a_phone_needs_no_sideways_scrolling(visit):
    page = visit(width=360)
    wide = {hash: page.evaluate(WIDEST) for hash in each_page(page)}
    assert max(wide.values()) <= 360, wide


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ink_stands_out_from_its_ground(visit, scheme):
    page = visit(color_scheme=scheme)
    names = sorted({name for pair in PAIRS for name in pair})
    read = "(names) => names.map((n) => getComputedStyle(document.documentElement).getPropertyValue(`--${n}`).trim())"
    colours = dict(zip(names, page.evaluate(read, names), strict=True))
    weak = {pair: found for pair in PAIRS if (found := contrast(colours[pair[0]], colours[pair[1]])) < 4.5}
    assert weak == {}
    edge, sheet = page.evaluate(read, ["edge", "sheet"])
    assert contrast(edge, sheet) >= 3  # edges of fields


def test_paper_shows_the_run_without_its_buttons(visit):
    page = visit(f"#/runs/{TREE}", color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("#bar").is_hidden()
    assert page.locator("#result-table").is_visible()
    ink = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')").strip()
    assert ink == "#000"


def contrast(one: str, other: str) -> float:
    """WCAG 2: 1 to 21."""
    light, dark = sorted(map(luminance, (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    found = re.fullmatch(r"#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})", colour)
    assert found, colour
    parts = [int(part, 16) / 255 for part in found.groups()]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("file", sorted(WEB.glob("*.js")), ids=lambda file: file.name)
def test_sources_are_short_and_never_make_markup_of_data(file):
    text = file.read_text("utf-8")
    assert text.startswith("// ")
    assert len(text.splitlines()) < 200
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        'setAttribute("style"',
    ):
        assert way not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
