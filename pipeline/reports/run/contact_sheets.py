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
from pipeline.reports.document.formatting import format_count, join_names
from pipeline.reports.document.page import CaptionedImage, ReportWriter
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.record import JsonObject, RunRecord

if TYPE_CHECKING:
    from sites.population.simulated_sites import FederatedDataset

MAX_SHEET_SITES = 8
MAX_SHEET_CLASSES = 16  # on a sheet
MAX_CLASSES_AS_ROWS = 3  # up to here a row a class; above, a column
TILES_PER_CLASS_ROW = 12  # tiles in the row of a class
TILES_PER_CLASS_COLUMN = 3  # tiles in the column of a class
TILE_SIDE_PIXELS = range(40, 57)  # pixels a side: smaller images are enlarged by whole factors, larger ones reduced
TILE_GAP_PIXELS = 2

TileArray = NDArray[np.uint8]  # (n, H, W, 3)


@dataclass(frozen=True)
class ContactSheetLayout:
    """Which class stands where on a sheet: the same on all sheets of a study, so that they can be compared."""

    classes: Sequence[int]  # in the order shown
    per_class: int
    classes_as_rows: bool  # a class is a row

    @classmethod
    def create(cls, num_classes: int, per_class: int | None, positive_index: int | None) -> ContactSheetLayout:
        first_class = 1 if positive_index is None and num_classes == 2 else positive_index
        order = sorted(range(num_classes), key=lambda class_index: class_index != first_class)[:MAX_SHEET_CLASSES]
        classes_as_rows = num_classes <= MAX_CLASSES_AS_ROWS
        return cls(
            order, per_class or (TILES_PER_CLASS_ROW if classes_as_rows else TILES_PER_CLASS_COLUMN), classes_as_rows
        )

    def describe(self, class_names: Sequence[str]) -> str:
        listed = ", ".join(class_names[class_index] for class_index in self.classes)
        num_hidden = len(class_names) - len(self.classes)
        listed += f" ({num_hidden} more classes are not shown)" if num_hidden else ""
        return f"{'Rows, from the top' if self.classes_as_rows else 'Columns, from the left'}: {listed}."

    def cell_position(self, class_position: int, tile_position: int) -> tuple[int, int]:
        return (class_position, tile_position) if self.classes_as_rows else (tile_position, class_position)

    @property
    def num_rows_columns(self) -> tuple[int, int]:
        return (len(self.classes), self.per_class) if self.classes_as_rows else (self.per_class, len(self.classes))


def make_contact_sheets(
    dataset: FederatedDataset, per_class: int | None = None, seed: int = 0, positive_class: str | None = None
) -> dict[str, bytes]:
    """site -> PNG, of the first SHOWN_SITES sites; nothing for data that are no images. A class that a site lacks stays blank."""
    if not has_image_shape(dataset.shape):
        return {}
    layout = contact_sheet_layout(dataset, per_class, positive_class)
    return {site: _draw_contact_sheet(dataset, site, layout, seed) for site in dataset.sites[:MAX_SHEET_SITES]}


def write_contact_sheets(folder: Path, dataset: FederatedDataset, positive_class: str | None = None) -> None:
    """cells/*.png, and cells/index.json that says which is whose."""
    sheets = make_contact_sheets(dataset, positive_class=positive_class)
    if not sheets:
        return
    layout_text = contact_sheet_layout(dataset, None, positive_class).describe(dataset.classes)
    sheet_index = {}
    for number, (site, png) in enumerate(sheets.items(), 1):
        file_name = f"{number}-{re.sub(r'[^A-Za-z0-9]+', '-', site)[:40].strip('-')}.png"
        write_atomically(folder / "cells" / file_name, png)
        sheet_index[site] = {
            "file": file_name,
            "words": dataset.acquisition_descriptions.get(site, ""),
            "shows": layout_text,
        }
    write_atomically(folder / "cells" / "index.json", json.dumps(sheet_index, indent=1).encode())


def has_image_shape(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3)


def contact_sheet_layout(
    dataset: FederatedDataset, per_class: int | None, positive_class: str | None
) -> ContactSheetLayout:
    positive_index = dataset.classes.index(positive_class) if positive_class in dataset.classes else None
    return ContactSheetLayout.create(len(dataset.classes), per_class, positive_index)


def _draw_contact_sheet(dataset: FederatedDataset, site: str, layout: ContactSheetLayout, seed: int) -> bytes:
    from PIL import Image

    train_rows = dataset.split_indices[site].train
    labels = dataset.pool.labels(train_rows).cpu().numpy()
    rng = np.random.default_rng([seed, dataset.sites.index(site)])
    rows_by_class = [rng.permutation(np.flatnonzero(labels == label))[: layout.per_class] for label in layout.classes]
    tiles = _load_tiles(dataset, site, np.concatenate(rows_by_class))
    tile_size = tiles.shape[1:3]
    rows, columns = layout.num_rows_columns
    canvas = np.zeros(
        (
            rows * (tile_size[0] + TILE_GAP_PIXELS) - TILE_GAP_PIXELS,
            columns * (tile_size[1] + TILE_GAP_PIXELS) - TILE_GAP_PIXELS,
            4,
        ),
        np.uint8,
    )  # transparent
    positions = [
        layout.cell_position(class_position, tile_position)
        for class_position, class_rows in enumerate(rows_by_class)
        for tile_position in range(len(class_rows))
    ]
    for (row, column), tile in zip(positions, tiles, strict=True):
        top, left = row * (tile_size[0] + TILE_GAP_PIXELS), column * (tile_size[1] + TILE_GAP_PIXELS)
        canvas[top : top + tile_size[0], left : left + tile_size[1]] = np.dstack(
            [tile, np.full(tile_size, 255, np.uint8)]
        )
    buffer = io.BytesIO()
    Image.fromarray(canvas).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _load_tiles(dataset: FederatedDataset, site: str, chosen: NDArray[np.int64]) -> TileArray:
    import torch
    from PIL import Image

    train_rows = dataset.split_indices[site].train
    inputs = (
        dataset.pool.inputs(train_rows[torch.from_numpy(chosen).to(train_rows.device)]).cpu().numpy()
    )  # (n, C, H, W) in [0, 1]
    tiles = np.ascontiguousarray((255 * inputs.clip(0, 1)).round().astype(np.uint8).transpose(0, 2, 3, 1))
    if tiles.shape[-1] == 1:
        tiles = np.repeat(tiles, 3, axis=-1)
    longer_side = max(tiles.shape[1:3])
    if longer_side < TILE_SIDE_PIXELS.start:
        factor = -(-TILE_SIDE_PIXELS.start // longer_side)
        return tiles.repeat(factor, axis=1).repeat(factor, axis=2)
    if longer_side < TILE_SIDE_PIXELS.stop:
        return tiles
    height, width = (max(1, round(edge * (TILE_SIDE_PIXELS.stop - 1) / longer_side)) for edge in tiles.shape[1:3])
    return np.stack([np.asarray(Image.fromarray(tile).resize((width, height), Image.Resampling.BOX)) for tile in tiles])


# The section of a run's report that shows each site's cells; nothing where the run kept none, as one across hospitals.

PNG_SIGNATURE = b"\x89PNG"


def add_contact_sheet_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    sheet_index = _load_sheet_index(record.folder / "cells")
    images = [_captioned_sheet(record, headline, site, entry) for site, entry in sheet_index.items()]
    shown = [image for image in images if image.png]
    if not shown:
        return
    description = "Training images drawn at random at each simulated site, as its own scanner sees them."
    num_hidden_sites = len(record.sites) - len(shown)
    if num_hidden_sites > 0:
        description += (
            f" Shown: {len(shown)} of {format_count(len(record.sites), 'site')}; {num_hidden_sites:,} more took part."
        )
    layouts = list(dict.fromkeys(str(entry.get("shows") or "") for entry in sheet_index.values()))
    if len(layouts) == 1 and layouts[0]:
        description += f" {layouts[0]} A blank place: the site has no more of that class."
    writer.page.add_section("What each site sees").add_text(description).add_images(shown)


def describe_class_counts(classes: Sequence[str], train: Sequence[int], positive_class: str | None) -> str:
    """How many images a site trains on: the positive ones, or the commonest where no class is."""
    total_text = format_count(sum(train), "training image")
    if positive_class in classes and len(train) == len(classes):
        num_positive = train[classes.index(positive_class)]
        return f"{total_text}, {num_positive:,} of them {positive_class}" + (
            f" ({100 * num_positive / sum(train):.1f} %)" if num_positive else ""
        )
    if len(classes) != len(train) or not sum(train):
        return total_text
    most_frequent = sorted(range(len(train)), key=lambda label_index: -train[label_index])[:3]
    return f"{total_text}, most often {join_names([f'{classes[label_index]} ({train[label_index]:,})' for label_index in most_frequent if train[label_index]])}"


def _load_sheet_index(folder: Path) -> dict[str, JsonObject]:
    """A damaged index is one without sheets: the report's numbers do not wait for pictures."""
    try:
        sheet_index = json.loads((folder / "index.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {str(site): entry for site, entry in sheet_index.items() if isinstance(entry, dict)}
        if isinstance(sheet_index, dict)
        else {}
    )


def _captioned_sheet(record: RunRecord, headline: HeadlineMetric, site: str, entry: JsonObject) -> CaptionedImage:
    classes = [str(label) for label in record.site_data.get("classes") or ()]
    train_counts = ((record.site_data.get("sites") or {}).get(site) or {}).get("train") or ()
    counts_text = describe_class_counts(classes, train_counts, headline.positive_class) if train_counts else ""
    paragraphs = [paragraphs for paragraphs in (str(entry.get("words") or ""), counts_text) if paragraphs]
    alt = f"Training images of {site}. {entry.get('shows') or ''}".strip()
    return CaptionedImage(site, _read_png(record.folder / "cells", str(entry.get("file") or "")), alt, paragraphs)


def _read_png(folder: Path, file_name: str) -> bytes | None:
    path = folder / Path(file_name).name
    content = path.read_bytes() if path.is_file() else b""
    return content if content.startswith(PNG_SIGNATURE) else None
