"""Contact sheets: a few training cells of every simulated site, as that site sees them.

Images of patients' cells: they are made only where all data lie on one machine anyway.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.core.files import write_atomically
from pipeline.reports.document.formatting import count_of, joined
from pipeline.reports.document.page import Picture, Sheet
from pipeline.reports.run.headline_metric import Lens
from pipeline.reports.run.record import Json, Record

if TYPE_CHECKING:
    from sites.population.simulated_sites import Population

SHOWN_SITES = 8
MOST_CLASSES = 16  # on a sheet
FEW_CLASSES = 3  # up to here a row a class; above, a column
LINE = 12  # tiles in the row of a class
DEEP = 3  # tiles in the column of a class
TILE = range(40, 57)  # pixels a side: smaller images are enlarged by whole factors, larger ones reduced
GAP = 2

Tiles = NDArray[np.uint8]  # (n, H, W, 3)


@dataclass(frozen=True)
class Grid:
    """Which class stands where on a sheet: the same on all sheets of a study, so that they can be compared."""

    classes: Sequence[int]  # in the order shown
    per_class: int
    across: bool  # a class is a row

    @classmethod
    def of(cls, classes: int, per_class: int | None, positive: int | None) -> Grid:
        lead = 1 if positive is None and classes == 2 else positive
        order = sorted(range(classes), key=lambda at: at != lead)[:MOST_CLASSES]
        across = classes <= FEW_CLASSES
        return cls(order, per_class or (LINE if across else DEEP), across)

    def words(self, names: Sequence[str]) -> str:
        listed = ", ".join(names[at] for at in self.classes)
        more = len(names) - len(self.classes)
        listed += f" ({more} more classes are not shown)" if more else ""
        return f"{'Rows, from the top' if self.across else 'Columns, from the left'}: {listed}."

    def place(self, nth_class: int, nth: int) -> tuple[int, int]:
        return (nth_class, nth) if self.across else (nth, nth_class)

    @property
    def size(self) -> tuple[int, int]:
        return (len(self.classes), self.per_class) if self.across else (self.per_class, len(self.classes))


def contact_sheets(
    people: Population, per_class: int | None = None, seed: int = 0, positive: str | None = None
) -> dict[str, bytes]:
    """site -> PNG, of the first SHOWN_SITES sites; nothing for data that are no images. A class that a site lacks stays blank."""
    if not is_images(people.shape):
        return {}
    grid = grid_of(people, per_class, positive)
    return {site: _sheet(people, site, grid, seed) for site in people.sites[:SHOWN_SITES]}


def write_cells(folder: Path, people: Population, positive: str | None = None) -> None:
    """cells/*.png, and cells/index.json that says which is whose."""
    sheets = contact_sheets(people, positive=positive)
    if not sheets:
        return
    shows = grid_of(people, None, positive).words(people.classes)
    index = {}
    for number, (site, png) in enumerate(sheets.items(), 1):
        file = f"{number}-{re.sub(r'[^A-Za-z0-9]+', '-', site)[:40].strip('-')}.png"
        write_atomically(folder / "cells" / file, png)
        index[site] = {"file": file, "words": people.acquisitions.get(site, ""), "shows": shows}
    write_atomically(folder / "cells" / "index.json", json.dumps(index, indent=1).encode())


def is_images(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3)


def grid_of(people: Population, per_class: int | None, positive: str | None) -> Grid:
    at = people.classes.index(positive) if positive in people.classes else None
    return Grid.of(len(people.classes), per_class, at)


def _sheet(people: Population, site: str, grid: Grid, seed: int) -> bytes:
    from PIL import Image

    train = people.examples[site].train
    labels = people.pool.labels(train).cpu().numpy()
    rng = np.random.default_rng([seed, people.sites.index(site)])
    chosen = [rng.permutation(np.flatnonzero(labels == label))[: grid.per_class] for label in grid.classes]
    tiles = _tiles(people, site, np.concatenate(chosen))
    side = tiles.shape[1:3]
    rows, columns = grid.size
    canvas = np.zeros((rows * (side[0] + GAP) - GAP, columns * (side[1] + GAP) - GAP, 4), np.uint8)  # transparent
    places = [grid.place(at, nth) for at, mine in enumerate(chosen) for nth in range(len(mine))]
    for (row, column), tile in zip(places, tiles, strict=True):
        top, left = row * (side[0] + GAP), column * (side[1] + GAP)
        canvas[top : top + side[0], left : left + side[1]] = np.dstack([tile, np.full(side, 255, np.uint8)])
    buffer = io.BytesIO()
    Image.fromarray(canvas).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _tiles(people: Population, site: str, chosen: NDArray[np.int64]) -> Tiles:
    import torch
    from PIL import Image

    train = people.examples[site].train
    x = people.pool.inputs(train[torch.from_numpy(chosen).to(train.device)]).cpu().numpy()  # (n, C, H, W) in [0, 1]
    tiles = np.ascontiguousarray((255 * x.clip(0, 1)).round().astype(np.uint8).transpose(0, 2, 3, 1))
    if tiles.shape[-1] == 1:
        tiles = np.repeat(tiles, 3, axis=-1)
    side = max(tiles.shape[1:3])
    if side < TILE.start:
        factor = -(-TILE.start // side)
        return tiles.repeat(factor, axis=1).repeat(factor, axis=2)
    if side < TILE.stop:
        return tiles
    height, width = (max(1, round(edge * (TILE.stop - 1) / side)) for edge in tiles.shape[1:3])
    return np.stack([np.asarray(Image.fromarray(t).resize((width, height), Image.Resampling.BOX)) for t in tiles])


# The section of a run's report that shows each site's cells; nothing where the run kept none, as one across hospitals.

PNG = b"\x89PNG"


def cells(sheet: Sheet, record: Record, lens: Lens) -> None:
    found = _index(record.folder / "cells")
    pictures = [_picture(record, lens, site, entry) for site, entry in found.items()]
    shown = [picture for picture in pictures if picture.png]
    if not shown:
        return
    words = "Training images drawn at random at each simulated site, as its own scanner sees them."
    others = len(record.sites) - len(shown)
    if others > 0:
        words += f" Shown: {len(shown)} of {count_of(len(record.sites), 'site')}; {others:,} more took part."
    shows = list(dict.fromkeys(str(entry.get("shows") or "") for entry in found.values()))
    if len(shows) == 1 and shows[0]:
        words += f" {shows[0]} A blank place: the site has no more of that class."
    sheet.page.section("What each site sees").text(words).pictures(shown)


def counts_words(classes: Sequence[str], train: Sequence[int], positive: str | None) -> str:
    """How many images a site trains on: the positive ones, or the commonest where no class is."""
    cells = count_of(sum(train), "training image")
    if positive in classes and len(train) == len(classes):
        share = train[classes.index(positive)]
        return f"{cells}, {share:,} of them {positive}" + (f" ({100 * share / sum(train):.1f} %)" if share else "")
    if len(classes) != len(train) or not sum(train):
        return cells
    common = sorted(range(len(train)), key=lambda at: -train[at])[:3]
    return f"{cells}, most often {joined([f'{classes[at]} ({train[at]:,})' for at in common if train[at]])}"


def _index(folder: Path) -> dict[str, Json]:
    """A damaged index is one without sheets: the report's numbers do not wait for pictures."""
    try:
        found = json.loads((folder / "index.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {str(site): entry for site, entry in found.items() if isinstance(entry, dict)}
        if isinstance(found, dict)
        else {}
    )


def _picture(record: Record, lens: Lens, site: str, entry: Json) -> Picture:
    classes = [str(label) for label in record.data.get("classes") or ()]
    train = ((record.data.get("sites") or {}).get(site) or {}).get("train") or ()
    counts = counts_words(classes, train, lens.positive) if train else ""
    words = [words for words in (str(entry.get("words") or ""), counts) if words]
    alt = f"Training images of {site}. {entry.get('shows') or ''}".strip()
    return Picture(site, _png(record.folder / "cells", str(entry.get("file") or "")), alt, words)


def _png(folder: Path, file: str) -> bytes | None:
    path = folder / Path(file).name
    content = path.read_bytes() if path.is_file() else b""
    return content if content.startswith(PNG) else None
