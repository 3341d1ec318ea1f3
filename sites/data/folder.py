"""A folder of images: a folder for each class (`class_name/*.png`), or a CSV manifest (see manifest.py).

Without a split column the share `test` is set apart, whole patients where they are known; the share `val` of the
rest is for validation, unless the split column already names some `val`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline.core.errors import BadData, MissingData
from sites.data.base import SPLITS, Dataset, Key, Source, carve, fingerprint
from sites.data.images import SUFFIXES, decode_all, listing
from sites.data.manifest import Entry, read_manifest


class Folder(Source):
    name: Literal["folder"] = "folder"
    manifest: str | None = None  # a CSV file, relative to the folder
    patient: str | None = None  # the manifest's column that is the privacy unit; default patient, slide or group
    classes: tuple[str, ...] | None = Field(None, min_length=2)  # their order; default all, sorted
    size: int | None = Field(None, gt=0)  # resized to a square of so many pixels; default as they are, all alike
    channels: Literal[1, 3] = 3
    corrupt: Literal["refuse", "skip"] = "refuse"
    test: float = Field(0.2, ge=0, lt=1)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.patient and not self.manifest:
            raise ValueError("patient names a column of a manifest; say manifest = 'file.csv' as well")
        if self.classes and len(set(self.classes)) < len(self.classes):
            raise ValueError("classes names one class twice; remove one")
        return self

    def load(self, root: Path | None, seed: int) -> Dataset:
        folder = self.path or root
        if folder is None:
            raise MissingData("no folder of images is named; say data.path, --data or HEMOFED_DATA")
        if not folder.is_dir():
            raise MissingData(f"{folder} is no folder; correct data.path, --data or HEMOFED_DATA")
        if self.manifest:
            entries, unit = read_manifest(folder, self.manifest, self.patient, self.classes)
        else:
            entries, unit = _scan(folder, self.classes), None
        entries, images, skipped = self._decode(folder, entries)
        classes = self.classes or tuple(sorted({e.label for e in entries}))
        if len(classes) < 2:
            raise BadData(
                f"{folder}: all images are {classes[0]!r}; add another class, or name them all in data.classes"
            )
        x = torch.from_numpy(images)
        y = torch.tensor([classes.index(e.label) for e in entries])
        keys = {column: _key([e.keys[column] for e in entries]) for column in entries[0].keys}
        split = self._split(folder, entries, seed, keys[unit].codes.numpy() if unit else None)
        return Dataset(x, y, classes, torch.from_numpy(split), fingerprint(x, y, split), keys, unit, skipped)

    def _decode(self, folder: Path, entries: list[Entry]) -> tuple[list[Entry], np.ndarray, tuple[str, ...]]:
        decoded = decode_all([e.file for e in entries], self.channels, self.size)
        bad = [f"{e.shown}: {d}" for e, d in zip(entries, decoded, strict=True) if isinstance(d, str)]
        if bad and (self.corrupt == "refuse" or len(bad) == len(entries)):
            raise BadData(
                f"{folder}: {len(bad)} of {len(entries)} images cannot be used; repair or remove them, "
                f"or say data.corrupt = 'skip':{listing(bad)}"
            )
        good = [(e, d) for e, d in zip(entries, decoded, strict=True) if not isinstance(d, str)]
        sizes = Counter(d.shape[1:] for _, d in good)
        if len(sizes) > 1:
            found = listing([f"{w} x {h}: {n} images" for (h, w), n in sizes.most_common()])
            raise BadData(f"{folder}: the images differ in size; say data.size to resize them all:{found}")
        return [e for e, _ in good], np.stack([d for _, d in good]), tuple(bad)

    def _split(self, folder: Path, entries: Sequence[Entry], seed: int, unit: np.ndarray | None) -> np.ndarray:
        """(N,) uint8"""
        if entries[0].split is None:
            split = carve(np.zeros(len(entries), np.uint8), self.test, seed, unit, into="test")
            wanted = {"train", "test"} if self.test else {"train"}
        else:
            split = np.array([SPLITS.index(e.split or "") for e in entries], np.uint8)
            wanted = {"train"}
            _no_leak(folder, entries, split, unit)
        if not (split == SPLITS.index("val")).any():
            split = carve(split, self.val, seed, unit)
        for part in sorted(wanted):
            if not (split == SPLITS.index(part)).any():
                units = "" if unit is None else f" of {len(np.unique(unit))} patients (or other units)"
                raise BadData(
                    f"{folder}: {len(entries)} images{units} leave nothing for {part}; "
                    "change data.test and data.val, or give the manifest a split column"
                )
        return split


def _no_leak(folder: Path, entries: Sequence[Entry], split: np.ndarray, unit: np.ndarray | None) -> None:
    """One patient in train and in test would make the test too good."""
    if unit is None:
        return
    splits = {u: set(split[unit == u]) for u in np.unique(unit)}
    shared = [e.shown for u, found in splits.items() if len(found) > 1 for e in (entries[int(np.argmax(unit == u))],)]
    if shared:
        raise BadData(
            f"{folder}: {len(shared)} patients (or other units) are in more than one split; give each of them one. "
            f"Their first images:{listing(shared)}"
        )


def _scan(folder: Path, classes: tuple[str, ...] | None) -> list[Entry]:
    entries = [
        Entry(f"{label.name}/{file.name}", file, label.name)
        for label in sorted(folder.iterdir())
        if label.is_dir() and not label.name.startswith(".")
        for file in sorted(label.iterdir())
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    ]
    deeper = [d.name for d in sorted(folder.iterdir()) if d.is_dir() and not any(e.label == d.name for e in entries)]
    deeper = [
        name for name in deeper if not name.startswith(".") and any(p.is_dir() for p in (folder / name).iterdir())
    ]
    if entries and deeper:
        raise BadData(
            f"{folder}: {', '.join(deeper)} has folders but no images of its own; put the images right into the class's "
            "folder, or list them in a manifest"
        )
    if not entries:
        raise MissingData(
            f"{folder} has no class folders with images ({', '.join(sorted(SUFFIXES))}); put each class in a folder "
            "of its name, or say data.manifest"
        )
    if classes is not None and (others := sorted({e.label for e in entries} - set(classes))):
        raise BadData(f"{folder}: {', '.join(others)} not in data.classes; add them there or move these folders away")
    return entries


def _key(values: Sequence[str]) -> Key:
    names, codes = np.unique(np.array(values), return_inverse=True)
    return Key(torch.from_numpy(codes.astype(np.int64)), tuple(str(n) for n in names))
