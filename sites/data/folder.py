"""A folder of images: one subfolder per class (`class_name/*.png`), or a CSV manifest (see manifest.py).

Without a split column, the fraction `test` becomes the test split, in whole patients if they are known; the fraction
`val` of the rest becomes the validation split, unless the split column names one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline.core.errors import DataError, MissingDataError
from sites.data.base import SPLITS, Dataset, DataSource, GroupKey, assign_split, fingerprint
from sites.data.images import IMAGE_SUFFIXES, decode_images, format_problems
from sites.data.manifest import ManifestEntry, read_manifest


class ImageFolder(DataSource):
    name: Literal["folder"] = "folder"
    manifest: str | None = None  # a CSV file, relative to the folder
    patient: str | None = None  # the manifest column with the privacy unit; default: patient, slide or group
    classes: tuple[str, ...] | None = Field(None, min_length=2)  # in this order; default: all, sorted
    size: int | None = Field(None, gt=0)  # side in pixels to resize to; default: no resizing, all must have one size
    channels: Literal[1, 3] = 3
    corrupt: Literal["refuse", "skip"] = "refuse"
    test: float = Field(0.2, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.patient and not self.manifest:
            raise ValueError("patient names a column of a manifest; set manifest = 'file.csv' too")
        if self.classes and len(set(self.classes)) < len(self.classes):
            raise ValueError("classes lists a class twice; remove one")
        return self

    def load(self, root: Path | None, seed: int) -> Dataset:
        folder = self.path or root
        if folder is None:
            raise MissingDataError("no image folder is given; set data.path, --data or HEMOFED_DATA")
        if not folder.is_dir():
            raise MissingDataError(f"{folder} is not a folder; correct data.path, --data or HEMOFED_DATA")
        if self.manifest:
            entries, unit_column = read_manifest(folder, self.manifest, self.patient, self.classes)
        else:
            entries, unit_column = scan_class_folders(folder, self.classes), None
        entries, images, skipped = self._decode_images(folder, entries)
        classes = self.classes or tuple(sorted({e.label for e in entries}))
        if len(classes) < 2:
            raise DataError(
                f"{folder}: all images are {classes[0]!r}; add another class, or list all classes of the study in data.classes"
            )
        x = torch.from_numpy(images)
        y = torch.tensor([classes.index(e.label) for e in entries])
        keys = {column: _group_key([e.keys[column] for e in entries]) for column in entries[0].keys}
        split = self._assign_splits(folder, entries, seed, keys[unit_column].codes.numpy() if unit_column else None)
        return Dataset(
            x=x,
            y=y,
            classes=classes,
            split=torch.from_numpy(split),
            fingerprint=fingerprint(x, y, split),
            keys=keys,
            privacy_unit=unit_column,
            skipped=skipped,
        )

    def _decode_images(
        self, folder: Path, entries: list[ManifestEntry]
    ) -> tuple[list[ManifestEntry], np.ndarray, tuple[str, ...]]:
        decoded = decode_images([e.file for e in entries], self.channels, self.size)
        failures = [f"{e.display_name}: {d}" for e, d in zip(entries, decoded, strict=True) if isinstance(d, str)]
        if failures and (self.corrupt == "refuse" or len(failures) == len(entries)):
            raise DataError(
                f"{folder}: {len(failures)} of {len(entries)} images cannot be used; repair or remove them, "
                f"or set data.corrupt = 'skip':{format_problems(failures)}"
            )
        decodable = [(e, d) for e, d in zip(entries, decoded, strict=True) if not isinstance(d, str)]
        sizes = Counter(d.shape[1:] for _, d in decodable)
        if len(sizes) > 1:
            found = format_problems([f"{w} x {h}: {n} images" for (h, w), n in sizes.most_common()])
            raise DataError(f"{folder}: the images differ in size; set data.size to resize them all:{found}")
        return [e for e, _ in decodable], np.stack([d for _, d in decodable]), tuple(failures)

    def _assign_splits(
        self, folder: Path, entries: Sequence[ManifestEntry], seed: int, unit_ids: np.ndarray | None
    ) -> np.ndarray:
        """(N,) uint8"""
        if entries[0].split is None:
            split = assign_split(np.zeros(len(entries), np.uint8), self.test, seed, unit_ids, target_split="test")
            required = {"train", "test"} if self.test else {"train"}
        else:
            split = np.array([SPLITS.index(e.split or "") for e in entries], np.uint8)
            required = {"train"}
            _check_unit_leaks(folder, entries, split, unit_ids)
        if not (split == SPLITS.index("val")).any():
            split = assign_split(split, self.val, seed, unit_ids)
        for part in sorted(required):
            if not (split == SPLITS.index(part)).any():
                units = "" if unit_ids is None else f" of {len(np.unique(unit_ids))} patients (or other units)"
                raise DataError(
                    f"{folder}: {len(entries)} images{units} leave nothing for {part}; "
                    "change data.test and data.val, or give the manifest a split column"
                )
        return split


def _check_unit_leaks(
    folder: Path, entries: Sequence[ManifestEntry], split: np.ndarray, unit_ids: np.ndarray | None
) -> None:
    """A patient in both train and test would make test results too optimistic."""
    if unit_ids is None:
        return
    splits = {u: set(split[unit_ids == u]) for u in np.unique(unit_ids)}
    leaking = [
        e.display_name
        for u, splits_of_unit in splits.items()
        if len(splits_of_unit) > 1
        for e in (entries[int(np.argmax(unit_ids == u))],)
    ]
    if leaking:
        raise DataError(
            f"{folder}: {len(leaking)} patients (or other units) are in more than one split; assign each to one. "
            f"Their first images:{format_problems(leaking)}"
        )


def scan_class_folders(folder: Path, classes: tuple[str, ...] | None) -> list[ManifestEntry]:
    """The images of all class folders, sorted by path; no image is opened."""
    entries = [
        ManifestEntry(f"{label.name}/{file.name}", file, label.name)
        for label in sorted(folder.iterdir())
        if label.is_dir() and not label.name.startswith(".")
        for file in sorted(label.iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    ]
    nested_folders = [
        d.name for d in sorted(folder.iterdir()) if d.is_dir() and not any(e.label == d.name for e in entries)
    ]
    nested_folders = [
        name
        for name in nested_folders
        if not name.startswith(".") and any(p.is_dir() for p in (folder / name).iterdir())
    ]
    if entries and nested_folders:
        raise DataError(
            f"{folder}: {', '.join(nested_folders)} has subfolders but no images; put the images directly into the class folder, "
            "or list them in a manifest"
        )
    if not entries:
        raise MissingDataError(
            f"{folder} has no class folders with images ({', '.join(sorted(IMAGE_SUFFIXES))}); put the images of each class "
            "into a folder named after the class, or set data.manifest"
        )
    if classes is not None and (others := sorted({e.label for e in entries} - set(classes))):
        raise DataError(
            f"{folder}: {', '.join(others)} not in data.classes; add the classes there, or remove these folders"
        )
    return entries


def _group_key(values: Sequence[str]) -> GroupKey:
    names, codes = np.unique(np.array(values), return_inverse=True)
    return GroupKey(torch.from_numpy(codes.astype(np.int64)), tuple(str(n) for n in names))
