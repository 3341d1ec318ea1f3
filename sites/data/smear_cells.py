"""Real blood cells: a packed cell file (smear/npz_file.py), or a folder laid out as Chula-RBC-12 (smear/chula_folder.py).

Repeats of a cell in an overlapping field and uncategorised cells are excluded from every split and reported. Test cells
are the fold `test_fold` if the data have folds, otherwise about the fraction `test`; validation cells are about the fraction
`val` of the others. A unit (slide, or fields of the same glass) is never split.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from pipeline.core.errors import DataError, IncompatibleStudyError, MissingDataError
from sites.data.base import SPLITS, Dataset, DataSource, assign_split, fingerprint
from sites.data.smear.chula_folder import CHULA_FOLDERS, read_chula_folder
from sites.data.smear.npz_file import read_cell_file
from sites.data.smear.records import CHULA_TYPES, UNCATEGORISED, CellRecords

SCHISTOCYTE = "schistocyte"


class SmearCells(DataSource):
    name: Literal["smear_cells"] = "smear_cells"
    cell_pixels: ClassVar[float | None] = 41.0  # median in Chula's fields
    resize_filter: ClassVar[Literal["area", "triangle"]] = "area"
    # a name without a folder: a study must not reach files elsewhere on a site's disk
    file: str = Field("chula_rbc12.npz", pattern=r"^[^/\\]+\.npz$")
    task: Literal["schistocyte", "types", "labels"] = "schistocyte"
    # batch 4 is one stain with elliptocytes only; "all" instead of None, which TOML lacks
    batches: tuple[int, ...] | Literal["all"] = Field((0, 1, 2, 3), min_length=1)
    size: int = Field(72, ge=24, le=96)
    # side in pixels of the crop around a point of a Chula folder; cell files contain crops
    window: int = Field(72, ge=24, le=512)
    test_fold: int = Field(0, ge=0)
    test: float = Field(0.2, ge=0, lt=1)
    val: float = Field(0.15, ge=0, lt=1)

    @property
    def window_pixels(self) -> float | None:
        return float(self.window)

    def load(self, root: Path | None, seed: int) -> Dataset:
        cells = self._find_cells(root)
        classes, labels = self._assign_classes(cells)
        rows, notes = self._select_rows(cells)
        split = self._assign_splits(cells, rows, seed)
        x = torch.from_numpy(cells.decode_pixels(rows))
        y = torch.from_numpy(labels[rows])
        keys = {
            name: column.to_group_key(name, rows) for name, column in (*cells.keys.items(), ("type", cells.cell_type))
        }
        digest = fingerprint(x, y, split)
        return Dataset(
            x=x,
            y=y,
            classes=classes,
            split=torch.from_numpy(split),
            fingerprint=digest,
            keys=keys,
            privacy_unit=cells.unit,
            skipped=(*cells.skipped, *notes),
        )

    def _find_cells(self, root: Path | None) -> CellRecords:
        location = self.path or root
        if location is not None:
            for file in (location, location / self.file):
                if file.is_file():
                    return read_cell_file(file, self.size)
            if all((location / part).is_dir() for part in CHULA_FOLDERS):
                return read_chula_folder(location, self.window, self.size)
        if location is None:
            search_result = "no file or folder is given"
        elif not location.exists():
            search_result = f"{location} does not exist"
        else:
            search_result = f"{location} has neither {self.file} nor the folders {' and '.join(CHULA_FOLDERS)}"
        raise MissingDataError(
            f"blood cells were not found: {search_result}\n"
            "Do one of these:\n"
            "  - git clone https://github.com/Chula-PIC-Lab/Chula-RBC-12-Dataset, and name that folder in data.path, "
            "--data or HEMOFED_DATA\n"
            "  - name a folder with the cell file data.file there, or the file itself\n"
            '  - set data.name = "folder" for your own images of single cells, or "synthetic_smear" for rendered ones'
        )

    def _assign_classes(self, cells: CellRecords) -> tuple[tuple[str, ...], np.ndarray]:
        """The classes, and the class of every cell (-1: none). Types without cells remain, so that models are comparable."""
        types, codes = cells.type_names, cells.cell_type.values
        if self.task == SCHISTOCYTE and SCHISTOCYTE in types:
            return ("other", SCHISTOCYTE), (codes == types.index(SCHISTOCYTE)).astype(np.int64)
        classes = tuple(t for t in types if t != UNCATEGORISED)
        if self.task == "labels" or (self.task == "types" and set(types) == set(CHULA_TYPES)):
            if len(classes) < 2:
                raise DataError(f"{cells.origin} has fewer than two classes; set data.file to another file")
            return classes, np.array([classes.index(t) if t in classes else -1 for t in types], np.int64)[codes]
        raise IncompatibleStudyError(
            f"data.task = {self.task!r} needs Chula's cell types, but {cells.origin} has {', '.join(types)}; "
            "set data.task = 'labels'"
        )

    def _select_rows(self, cells: CellRecords) -> tuple[np.ndarray, list[str]]:
        """The selected rows, and notes on the excluded ones."""
        reasons = {
            f"cells of type {UNCATEGORISED}": np.array([t == UNCATEGORISED for t in cells.type_names])[
                cells.cell_type.values
            ],
            "repeats of a cell in an overlapping field": cells.is_repeat,
        }
        if "batch" in cells.keys and self.batches != "all":
            if unknown := sorted(set(self.batches) - set(cells.batches)):
                raise IncompatibleStudyError(
                    f"data.batches: {cells.origin} has no batch {', '.join(map(str, unknown))}; "
                    f"valid: {', '.join(map(str, cells.batches))}, or 'all'"
                )
            is_other_batch = ~np.isin(cells.keys["batch"].values, self.batches)
            reasons = {"cells of batches that data.batches does not name": is_other_batch, **reasons}
        is_selected = np.ones(len(cells.is_repeat), bool)
        notes = []
        for reason, is_excluded in reasons.items():
            if count := int((is_selected & is_excluded).sum()):
                notes.append(f"{cells.origin}: {reason} left out: {count}")
            is_selected &= ~is_excluded
        if not is_selected.any():
            raise DataError(f"{cells.origin}: no cell is left to use; change data.batches. " + "; ".join(notes))
        return np.flatnonzero(is_selected), notes

    def _assign_splits(self, cells: CellRecords, rows: np.ndarray, seed: int) -> np.ndarray:
        """(n,) uint8"""
        unit_ids = cells.keys[cells.unit].values[rows]
        if cells.fold is None:
            split = assign_split(np.zeros(len(rows), np.uint8), self.test, seed, unit_ids, target_split="test")
        else:
            if self.test_fold not in cells.fold[rows]:
                valid = ", ".join(map(str, np.unique(cells.fold[rows])))
                raise IncompatibleStudyError(
                    f"data.test_fold = {self.test_fold}, but {cells.origin} has no such fold; valid: {valid}"
                )
            split = np.where(cells.fold[rows] == self.test_fold, SPLITS.index("test"), 0).astype(np.uint8)
        split = assign_split(split, self.val, seed, unit_ids)
        required = {"train": True, "test": cells.fold is None and self.test > 0}
        for part in (p for p, is_required in required.items() if is_required and not (split == SPLITS.index(p)).any()):
            raise DataError(
                f"{cells.origin}: {len(rows)} cells of {len(np.unique(unit_ids))} units ({cells.unit}) leave nothing for "
                f"{part}; change data.test, data.val or data.batches, or add fields"
            )
        return split
