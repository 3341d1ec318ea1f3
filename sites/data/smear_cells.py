"""Real blood cells: a packed cell file (sites/data/smear/npz_file.py), or a folder laid out as Chula-RBC-12 (sites/data/smear/chula_folder.py).

Repeats of a cell in an overlapping field and uncategorised cells are left out of every split, and told.
Test cells are the fold `test_fold` where the data have folds, else about the share `test`; validation cells about the
share `val` of the others. A unit (slide, or fields that show the same glass) is never split.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from pipeline.core.errors import BadData, MissingData, Refused
from sites.data.base import SPLITS, Dataset, Source, carve, fingerprint
from sites.data.smear.chula_folder import FOLDERS, read_folder
from sites.data.smear.npz_file import read_cells
from sites.data.smear.records import CHULA, UNCATEGORISED, Cells

SCHISTOCYTE = "schistocyte"


class SmearCells(Source):
    name: Literal["smear_cells"] = "smear_cells"
    cell_pixels: ClassVar[float | None] = 41.0  # the median longest side in Chula's fields
    resize: ClassVar[Literal["area", "triangle"]] = "area"
    # a plain name: who writes a study may not reach for files elsewhere on a site's disk
    file: str = Field("chula_rbc12.npz", pattern=r"^[^/\\]+\.npz$")
    task: Literal["schistocyte", "types", "labels"] = "schistocyte"
    # batch 4 is one stain with elliptocytes alone; "all" and not None, which TOML cannot say
    batches: tuple[int, ...] | Literal["all"] = Field((0, 1, 2, 3), min_length=1)
    size: int = Field(72, ge=24, le=96)
    window: int = Field(72, ge=24, le=512)  # pixels cut about a point of a Chula folder; cell files are cut already
    test_fold: int = Field(0, ge=0)
    test: float = Field(0.2, ge=0, lt=1)
    val: float = Field(0.15, ge=0, lt=1)

    @property
    def window_pixels(self) -> float | None:
        return float(self.window)

    def load(self, root: Path | None, seed: int) -> Dataset:
        cells = self._find(root)
        classes, labels = self._classes(cells)
        rows, told = self._choose(cells)
        split = self._split(cells, rows, seed)
        x = torch.from_numpy(cells.pixels(rows))
        y = torch.from_numpy(labels[rows])
        keys = {name: column.key(name, rows) for name, column in (*cells.keys.items(), ("type", cells.type))}
        marks = fingerprint(x, y, split)
        return Dataset(x, y, classes, torch.from_numpy(split), marks, keys, cells.unit, (*cells.skipped, *told))

    def _find(self, root: Path | None) -> Cells:
        place = self.path or root
        if place is not None:
            for file in (place, place / self.file):
                if file.is_file():
                    return read_cells(file, self.size)
            if all((place / part).is_dir() for part in FOLDERS):
                return read_folder(place, self.window, self.size)
        if place is None:
            looked = "no file or folder is named"
        elif not place.exists():
            looked = f"{place} does not exist"
        else:
            looked = f"{place} has neither {self.file} nor the folders {' and '.join(FOLDERS)}"
        raise MissingData(
            f"blood cells were not found: {looked}\n"
            "Any one of these helps:\n"
            "  - git clone https://github.com/Chula-PIC-Lab/Chula-RBC-12-Dataset, and name that folder by data.path, "
            "--data or HEMOFED_DATA\n"
            "  - name a folder with a cell file, or the file itself, in the same way; data.file says which one\n"
            '  - data.name = "folder" for your own images of single cells, "synthetic_smear" for drawn ones'
        )

    def _classes(self, cells: Cells) -> tuple[tuple[str, ...], np.ndarray]:
        """The classes, and every cell's (-1: has none). All types stay, also absent ones: models remain comparable."""
        types, codes = cells.types, cells.type.values
        if self.task == SCHISTOCYTE and SCHISTOCYTE in types:
            return ("other", SCHISTOCYTE), (codes == types.index(SCHISTOCYTE)).astype(np.int64)
        classes = tuple(t for t in types if t != UNCATEGORISED)
        if self.task == "labels" or (self.task == "types" and set(types) == set(CHULA)):
            if len(classes) < 2:
                raise BadData(f"{cells.origin} has no two classes; name another one by data.file")
            return classes, np.array([classes.index(t) if t in classes else -1 for t in types], np.int64)[codes]
        raise Refused(
            f"data.task = {self.task!r} needs Chula's cell types, but {cells.origin} has {', '.join(types)}; "
            "say data.task = 'labels'"
        )

    def _choose(self, cells: Cells) -> tuple[np.ndarray, list[str]]:
        """The rows that are kept, and what was left out."""
        reasons = {
            f"cells of type {UNCATEGORISED}": np.array([t == UNCATEGORISED for t in cells.types])[cells.type.values],
            "repeats of a cell in an overlapping field": cells.repeat,
        }
        if "batch" in cells.keys and self.batches != "all":
            if unknown := sorted(set(self.batches) - set(cells.batches)):
                raise Refused(
                    f"data.batches: {cells.origin} has no batch {', '.join(map(str, unknown))}; "
                    f"valid: {', '.join(map(str, cells.batches))}, or 'all'"
                )
            others = ~np.isin(cells.keys["batch"].values, self.batches)
            reasons = {"cells of batches that data.batches does not name": others, **reasons}
        keep = np.ones(len(cells.repeat), bool)
        told = []
        for reason, out in reasons.items():
            if count := int((keep & out).sum()):
                told.append(f"{cells.origin}: {reason} left out: {count}")
            keep &= ~out
        if not keep.any():
            raise BadData(f"{cells.origin}: no cell is left to use; change data.batches. " + "; ".join(told))
        return np.flatnonzero(keep), told

    def _split(self, cells: Cells, rows: np.ndarray, seed: int) -> np.ndarray:
        """(n,) uint8"""
        unit = cells.keys[cells.unit].values[rows]
        if cells.fold is None:
            split = carve(np.zeros(len(rows), np.uint8), self.test, seed, unit, into="test")
        else:
            if self.test_fold not in cells.fold[rows]:
                valid = ", ".join(map(str, np.unique(cells.fold[rows])))
                raise Refused(f"data.test_fold = {self.test_fold}, but {cells.origin} has no such fold; valid: {valid}")
            split = np.where(cells.fold[rows] == self.test_fold, SPLITS.index("test"), 0).astype(np.uint8)
        split = carve(split, self.val, seed, unit)
        wanted = {"train": True, "test": cells.fold is None and self.test > 0}
        for part in (p for p, needed in wanted.items() if needed and not (split == SPLITS.index(p)).any()):
            raise BadData(
                f"{cells.origin}: {len(rows)} cells of {len(np.unique(unit))} units ({cells.unit}) leave nothing for "
                f"{part}; change data.test, data.val or data.batches, or add fields"
            )
        return split
