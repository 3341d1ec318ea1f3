"""Contact sheets: sample training images of each simulated site, and the report section that shows them.

They can show patients' cells, so only simulations write them, where all data is on one machine; a federated run has none.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from pipeline.core.files import write_atomically
from pipeline.records.base import FrozenRecord
from pipeline.reports.document.formatting import format_count, join_names
from pipeline.reports.document.page import CaptionedImage, ReportWriter
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.record import RunRecord

if TYPE_CHECKING:
    from sites.population.simulated_sites import FederatedDataset

MAX_SHEET_SITES = 8
MAX_SHEET_CLASSES = 16
MAX_CLASSES_AS_ROWS = 3  # up to here one row per class; with more classes, one column per class
TILES_PER_CLASS_ROW = 12
TILES_PER_CLASS_COLUMN = 3
TILE_SIDE_PIXELS = range(40, 57)  # smaller images are enlarged by integer factors, larger ones reduced
TILE_GAP_PIXELS = 2
PNG_SIGNATURE = b"\x89PNG"

TileArray = NDArray[np.uint8]  # (n, H, W, 3)


class SheetEntry(FrozenRecord):
    """One site's contact sheet."""

    file: str
    acquisition: str  # how the site's scanner acquires images, in words
    layout: str  # which classes are where, in words


INDEX_FILE = "index.json"
SHEET_INDEX = TypeAdapter(dict[str, SheetEntry])  # by site


@dataclass(frozen=True)
class ContactSheetLayout:
    """The grid of classes and tiles, the same on all sheets of a study, so that they can be compared."""

    classes: Sequence[int]  # class indices in the order shown
    per_class: int  # tiles
    classes_as_rows: bool

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
    """site -> PNG, of the first MAX_SHEET_SITES sites; empty if the examples are not images. Missing classes stay blank."""
    if not has_image_shape(dataset.shape):
        return {}
    layout = contact_sheet_layout(dataset, per_class, positive_class)
    return {site: _draw_contact_sheet(dataset, site, layout, seed) for site in dataset.sites[:MAX_SHEET_SITES]}


def write_contact_sheets(folder: Path, dataset: FederatedDataset, positive_class: str | None = None) -> None:
    """Writes cells/*.png and their index."""
    sheets = make_contact_sheets(dataset, positive_class=positive_class)
    if not sheets:
        return
    layout_text = contact_sheet_layout(dataset, None, positive_class).describe(dataset.classes)
    sheet_index = {}
    for number, (site, png) in enumerate(sheets.items(), 1):
        file_name = f"{number}-{re.sub(r'[^A-Za-z0-9]+', '-', site)[:40].strip('-')}.png"
        write_atomically(folder / "cells" / file_name, png)
        sheet_index[site] = SheetEntry(
            file=file_name, acquisition=dataset.acquisition_descriptions.get(site, ""), layout=layout_text
        )
    write_atomically(folder / "cells" / INDEX_FILE, SHEET_INDEX.dump_json(sheet_index, indent=1))


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


def add_contact_sheet_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    sheet_index = _load_sheet_index(record.folder / "cells")
    images = [_captioned_sheet(record, headline, site, entry) for site, entry in sheet_index.items()]
    shown = [image for image in images if image.png]
    if not shown:
        return
    description = "Training images drawn at random at each simulated site, as acquired by its simulated scanner."
    num_hidden_sites = len(record.sites) - len(shown)
    if num_hidden_sites > 0:
        description += (
            f" Shown: {len(shown)} of {format_count(len(record.sites), 'site')}; {num_hidden_sites:,} more took part."
        )
    layouts = list(dict.fromkeys(entry.layout for entry in sheet_index.values()))
    if len(layouts) == 1 and layouts[0]:
        description += f" {layouts[0]} Blank tile: the site has no more examples of that class."
    writer.page.add_section("Training images by site").add_text(description).add_images(shown)


def describe_class_counts(classes: Sequence[str], train: Sequence[int], positive_class: str | None) -> str:
    """Number of training images, and of the positive class, or of the most frequent classes if none is positive."""
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


def _load_sheet_index(folder: Path) -> dict[str, SheetEntry]:
    """Empty if the index is damaged, so that a report is written without the images."""
    try:
        return SHEET_INDEX.validate_json((folder / INDEX_FILE).read_bytes())
    except (OSError, ValidationError):
        return {}


def _captioned_sheet(record: RunRecord, headline: HeadlineMetric, site: str, entry: SheetEntry) -> CaptionedImage:
    classes = record.site_data.classes
    train_counts = record.site_data.sites.get(site, {}).get("train", ())
    counts_text = describe_class_counts(classes, train_counts, headline.positive_class) if train_counts else ""
    paragraphs = [text for text in (entry.acquisition, counts_text) if text]
    alt = f"Training images of {site}. {entry.layout}".strip()
    return CaptionedImage(site, _read_png(record.folder / "cells", entry.file), alt, paragraphs)


def _read_png(folder: Path, file_name: str) -> bytes | None:
    path = folder / Path(file_name).name
    content = path.read_bytes() if path.is_file() else b""
    return content if content.startswith(PNG_SIGNATURE) else None
