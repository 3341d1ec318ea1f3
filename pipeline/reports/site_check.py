"""The page of `hemofed site check`: what a site's own images are like, for the eyes of the site alone."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from pipeline.reports.document.formatting import SPLITS, count_of, whole
from pipeline.reports.document.page import Bar, Cell, Column, Page, Picture

if TYPE_CHECKING:
    from sites.data_check.check import Check
    from sites.data_check.phi import Identity
    from sites.data_check.phi_tags import Tag

SHEET = 60  # images a class on its contact sheet
MOST_CLASSES = 24  # that have a sheet
MOST_ODD = 24  # images of a kind, or pairs
WHERE = 12  # names behind a finding
SMALL, LARGE = 56, 88  # pixels a side on the page
NOTICE = (
    "This page contains images: it must not leave the hospital. It was made on this machine; nothing was sent anywhere, "
    "and nothing was changed."
)
WORDS = {
    "stop": "a study should not begin before this is put right",
    "look": "nothing stands against a study, but somebody should look",
    "fine": "nothing was found",
}
PALETTE_CLASSES = 10  # bars of more classes cannot be told apart


def write_check(check: Check, site: str, read_as: str, out: Path, seed: int = 0) -> Path:
    page = Page(f"{site}: its images before a study", " · ".join(filter(None, [check.place, read_as])), NOTICE)
    _head(page, check)
    _findings(page, check)
    _counts(page, check)
    _odd(page, check)
    _copies(page, check)
    if check.identity is not None:
        _identity(page, check.identity)
    _sheets(page, check, seed)
    if check.skipped:
        page.section("What was left out").details(count_of(len(check.skipped), "note"), "\n".join(check.skipped))
    page.save(out)
    out.chmod(0o600)
    return out


def _head(page: Page, check: Check) -> None:
    tiles: list[tuple[str, Cell]] = [(WORDS[check.verdict], check.verdict.capitalize())]
    if check.census is not None:
        tiles.append(("examples", whole(check.census.examples)))
        tiles.append(("classes", whole(len(check.census.classes))))
        if check.census.unit is not None:
            tiles.append((f"{check.census.unit}s", whole(sum(check.census.units.values()))))
    if check.files:
        tiles.append(("files looked at", whole(check.files["files"])))
    page.tiles(tiles, lead=True)


def _findings(page: Page, check: Check) -> None:
    page.section("What was found")
    if not check.findings:
        page.text("Nothing that anybody should look at.")
        return
    rows: list[list[Cell]] = [
        [_badge(finding.level), (finding.what, _where(finding.where)), finding.cure] for finding in check.findings
    ]
    page.table([Column("Level"), Column("Finding", words=True), Column("Cure", words=True)], rows)


def _badge(level: str) -> Markup:
    colours = {"stop": "mark-ink", "look": "warn", "fine": "quiet"}
    badge = Markup('<span class="badge" style="color:var(--{})">{}</span>')
    return badge.format(colours[level], level.capitalize())


def _where(names: Sequence[str]) -> str:
    rest = len(names) - WHERE
    return ", ".join(names[:WHERE]) + (f" and {rest:,} more" if rest > 0 else "")


def _counts(page: Page, check: Check) -> None:
    census = check.census
    if census is None:
        return
    page.section("How much there is")
    bars = [
        Bar(f"{SPLITS.get(split, split).capitalize()} {sum(counts):,}", list(zip(census.classes, counts, strict=True)))
        for split, counts in census.counts.items()
        if sum(counts)
    ]
    if len(census.classes) <= PALETTE_CLASSES:
        page.legend(census.classes).pictures([Picture("", bars=bars)])
    total = max(census.examples, 1)
    rows = [
        [name, *(whole(counts[at]) for counts in census.counts.values()), whole(n), f"{100 * n / total:.1f} %"]
        for at, (name, n) in enumerate(zip(census.classes, census.totals, strict=True))
    ]
    if census.unit is not None:
        numbers = [whole(number) for number in census.units.values()]
        rows.append([f"{census.unit.capitalize()}s", *numbers, whole(sum(census.units.values())), ""])
    splits = [Column(SPLITS.get(split, split).capitalize(), True) for split in census.counts]
    page.table([Column("Class"), *splits, Column("In all", True), Column("Share", True)], rows)


def _pixels(check: Check, row: int) -> Pixels:
    assert check.holding is not None
    found: Pixels = check.holding.data.x[row].numpy()
    return found


def _odd(page: Page, check: Check) -> None:
    if not check.odd:
        return
    page.section("Images that stand out").text(
        "Compared with the site's own images, in units of their spread. What is odd need not be wrong: a rare stain is "
        "odd too. The most striking come first."
    )
    for odd in check.odd:
        rows = [int(row) for row in odd.rows[:MOST_ODD]]
        tiles = [Tile([_pixels(check, row)], check.names[row], check.names[row]) for row in rows]
        more = f" The first {MOST_ODD} are shown." if len(odd.rows) > MOST_ODD else ""
        title = f"{odd.kind.capitalize()}: {count_of(len(odd.rows), 'image')}"
        page.figure(gallery(title, tiles, LARGE), f"{odd.means.capitalize()}.{more}", wide=True)


def _copies(page: Page, check: Check) -> None:
    equal = check.copies.equal if check.copies is not None else ()
    if not equal and not check.near:
        return
    page.section("The same image more than once")
    for groups, what in (
        (equal, "Equal in every pixel"),
        (check.near, "Nearly the same, in two splits or of two units"),
    ):
        if groups:
            tiles = [_group(check, group) for group in groups[:MOST_ODD]]
            shown = "all are" if len(groups) <= MOST_ODD else f"the first {MOST_ODD} are"
            page.figure(gallery(what, tiles, LARGE), f"{len(groups):,} found; {shown} shown.", wide=True)


def _group(check: Check, rows: Sequence[int]) -> Tile:
    shown = rows[:2]
    words = [f"{check.names[row]} · {_place(check, row)}" for row in shown]
    words += [f"and {len(rows) - 2} more"] if len(rows) > 2 else []
    return Tile([_pixels(check, row) for row in shown], " = ".join(check.names[row] for row in rows), "\n".join(words))


def _place(check: Check, row: int) -> str:
    assert check.holding is not None
    assert check.census is not None
    data = check.holding.data
    label, split = check.census.classes[int(data.y[row])], int(data.split[row])
    return label if split >= len(SPLITS) else f"{label}, {SPLITS[('train', 'val', 'test')[split]]}"


def _identity(page: Page, found: Identity) -> None:
    from sites.data_check.phi import ranked
    from sites.data_check.phi_tags import WORDS as KINDS

    def rows(tags: dict[Tag, int]) -> list[list[str]]:
        return [[tag.name, KINDS[tag.kind], whole(number)] for tag, number in ranked(tags)]

    page.section("Who could be recognised, beside the pixels")
    columns = [Column("Tag"), Column("What it tells", words=True), Column("Files", True)]
    if not found.dicom and not found.beside:
        page.text(
            "No DICOM files lie here, and no picture has text, places, names or serial numbers beside its pixels."
        )
        return
    page.text("Names of tags that are filled in, and in how many files. What they say is not shown anywhere.")
    if found.dicom:
        said = ", ".join(f"{word}: {found.burned_in.get(key, 0):,}" for key, word in _BURNED.items())
        page.text(
            f"{count_of(found.dicom, 'DICOM file')}, of which {found.cleaned:,} say that identity was removed. Text in the "
            f"picture itself: {said}."
        )
        page.table(columns, rows(found.tags), "DICOM")
    if found.beside:
        page.table(columns, rows(found.beside), "Pictures")


_BURNED = {"yes": "yes", "no": "no", "unsaid": "not said"}


def _sheets(page: Page, check: Check, seed: int) -> None:
    if check.holding is None or check.census is None or not check.holding.is_images:
        return
    page.section("Images of each class").text(
        f"Up to {SHEET} of each, drawn at random. Point at an image for its name. Does each look like its class?"
    )
    y = check.holding.data.y.numpy()
    present = [at for at, number in enumerate(check.census.totals) if number]
    for at in present[:MOST_CLASSES]:
        rows = np.random.default_rng([seed, at]).permutation(np.flatnonzero(y == at))[:SHEET]
        tiles = [Tile([_pixels(check, int(row))], check.names[int(row)]) for row in np.sort(rows)]
        shown = f"{len(rows):,} of {(y == at).sum():,} images."
        page.figure(gallery(check.census.classes[at], tiles, SMALL), shown, wide=True)
    if len(present) > MOST_CLASSES:
        page.text(f"{len(present) - MOST_CLASSES:,} more classes are not shown.")


# Small images side by side, each with its name, inside a page: they wrap with its width and need no network.

SIDE = 96  # pixels of a stored image
PLAIN = 40  # pixels up to which JPEG would show

Pixels = NDArray[np.uint8]  # (C, H, W)


@dataclass(frozen=True)
class Tile:
    """One image, or several of the same size beside each other; `name` shows up when pointed at."""

    images: Sequence[Pixels]
    name: str
    words: str = ""  # stand below


def gallery(title: str, tiles: Sequence[Tile], shown: int) -> Markup:
    """`shown`: pixels a side on the page."""
    spans = Markup("").join(_span(tile, shown) for tile in tiles)
    head = Markup('<strong style="display:block;margin-bottom:.4rem">{}</strong>').format(title)
    return head + Markup('<div style="display:flex;flex-wrap:wrap;gap:{}px;padding:1px">{}</div>').format(
        14 if _worded(tiles) else 3, spans
    )


def _worded(tiles: Sequence[Tile]) -> bool:
    return any(tile.words for tile in tiles)


def _span(tile: Tile, shown: int) -> Markup:
    image = Markup(
        '<img src="{}" alt="{}" height="{}" style="display:inline-block;border-radius:3px;outline:1px solid var(--line);{}">'
    )
    crisp = "image-rendering:pixelated;" if max(tile.images[0].shape[1:]) <= PLAIN else ""
    drawn = Markup("&thinsp;").join(image.format(_source(one), tile.name, shown, crisp) for one in tile.images)
    width = shown * len(tile.images) + 8
    small = "display:block;font-size:.72rem;line-height:1.3;overflow-wrap:anywhere"
    words = Markup("").join(
        Markup('<span style="{}">{}</span>').format(small, escape(line)) for line in tile.words.splitlines()
    )
    limits = f"max-width:{max(width, 110)}px" if tile.words else ""
    return Markup('<span title="{}" style="display:inline-block;{}">{}{}</span>').format(
        tile.name, limits, drawn, words
    )


def _source(pixels: Pixels) -> str:
    from PIL import Image

    array: NDArray[Any] = pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(array))
    image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    buffer = io.BytesIO()
    kind = "PNG" if max(image.size) <= PLAIN else "JPEG"
    image.save(buffer, kind, **({"quality": 88} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
