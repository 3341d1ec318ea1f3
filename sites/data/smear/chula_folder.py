"""A folder laid out as Chula-RBC-12: images `Dataset/N.jpg`, and `Label/N.txt` with a line `x y type` per cell.

A cell is the window around its point, mirrored at the image border. The layout names neither slides nor patients:
images with equal pixels share a group, every other image is its own group. Partly overlapping views, and one view saved
or exposed twice, are NOT detected: with such images, or several images of one patient, list the cells in a manifest
(source `folder`) that names the patient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from sites.data.images import IMAGE_SUFFIXES, MAX_LISTED, decode_images, format_problems
from sites.data.smear.npz_file import read_resized_cells
from sites.data.smear.records import CHULA_TYPES, CellRecords, KeyColumn

CHULA_FOLDERS = ("Dataset", "Label")
LAST_FIELD_OF_BATCH = (60, 231, 422, 706, 738)  # Chula's last field of each batch: the background colour changes there
IMAGES_PER_CHUNK = 8  # images in memory at a time


@dataclass(frozen=True)
class CellAnnotation:
    x: int
    y: int
    cell_type: int
    line: int


@dataclass(frozen=True)
class AnnotatedField:
    stem: str
    points: Sequence[CellAnnotation]
    image_hash: str  # of its pixels
    cells: Sequence[np.ndarray]  # (size, size, 3) RGB


def read_chula_folder(folder: Path, window: int, size: int) -> CellRecords:
    """`window`: side in pixels of the crop around a point; `size`: side to which it is resized."""
    problems: list[str] = []
    image_files = _find_images(folder / "Dataset", problems)
    label_files = [f for f in _list_regular_files(folder / "Label", problems) if f.suffix.lower() == ".txt"]
    labels = {f.stem: _read_annotations(f, problems) for f in label_files}
    problems += [
        f"Label/{s}.txt: Dataset has no image {s}" for s, points in labels.items() if points and s not in image_files
    ]
    stems = sorted((s for s, points in labels.items() if points and s in image_files), key=_stem_sort_key)
    fields = []
    for first in range(0, len(stems), IMAGES_PER_CHUNK):
        chunk = stems[first : first + IMAGES_PER_CHUNK]
        for stem, image in zip(chunk, decode_images([image_files[s] for s in chunk], 3), strict=True):
            display_name = f"Dataset/{image_files[stem].name}"
            if isinstance(image, str):
                problems.append(f"{display_name}: {image}")
            elif min(image.shape[1:]) < window:
                problems.append(
                    f"{display_name}: {image.shape[2]} x {image.shape[1]} pixels, less than data.window = {window}"
                )
            elif outside := [p for p in labels[stem] if p.x >= image.shape[2] or p.y >= image.shape[1]]:
                reason = f"outside the image of {image.shape[2]} x {image.shape[1]}"
                problems += [f"Label/{stem}.txt, line {p.line}: {p.x} {p.y} is {reason}" for p in outside]
            else:
                fields.append(_crop_field(stem, labels[stem], image, window, size))
    if problems:
        raise DataError(f"{folder}: correct these, or remove them from Dataset and Label:{format_problems(problems)}")
    if not fields:
        raise DataError(f"{folder}: no image in Dataset has a line in Label; write `x y type` there for each cell")
    origin = folder.resolve().name
    return _build_records(origin, fields, _describe_skipped(origin, image_files, labels), window, size)


def _find_images(folder: Path, problems: list[str]) -> dict[str, Path]:
    files = [file for file in _list_regular_files(folder, problems) if file.suffix.lower() in IMAGE_SUFFIXES]
    by_stem = {file.stem: file for file in files}
    problems += [
        f"Dataset/{file.name}: {by_stem[file.stem].name} has the same name; rename one"
        for file in files
        if by_stem[file.stem] != file
    ]
    return by_stem


def _list_regular_files(folder: Path, problems: list[str]) -> list[Path]:
    """Regular files in the folder: reading a pipe would block forever, and a link may lead anywhere."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    regular_files = [f for f in files if f.is_file() and f.resolve().parent == folder.resolve()]
    problems += [f"{folder.name}/{f.name}: not a regular file of this folder" for f in files if f not in regular_files]
    return regular_files


def _read_annotations(file: Path, problems: list[str]) -> list[CellAnnotation]:
    try:
        lines = file.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"Label/{file.name}: cannot be read as text ({error})")
        return []
    points = []
    for line_number, line in enumerate(lines, 1):
        columns = line.split()
        if not columns:
            continue
        if len(columns) != 3 or not all(word.isdecimal() and len(word) < 10 for word in columns):
            problems.append(f"Label/{file.name}, line {line_number}: {line[:40]!r} is not `x y type` with integers")
        elif int(columns[2]) >= len(CHULA_TYPES):
            problems.append(
                f"Label/{file.name}, line {line_number}: type {columns[2]} is not in 0..{len(CHULA_TYPES) - 1}"
            )
        else:
            points.append(CellAnnotation(int(columns[0]), int(columns[1]), int(columns[2]), line_number))
    first_line: dict[tuple[int, int], int] = {}
    problems += [
        f"Label/{file.name}, line {p.line}: {p.x} {p.y} is already on line {first_line[p.x, p.y]}"
        for p in points
        if first_line.setdefault((p.x, p.y), p.line) != p.line
    ]
    return points


def _stem_sort_key(stem: str) -> tuple[int, str]:
    return (int(stem), stem) if stem.isdecimal() else (-1, stem)


def _crop_field(
    stem: str, points: Sequence[CellAnnotation], image: np.ndarray, window: int, size: int
) -> AnnotatedField:
    import cv2

    before, after = window // 2, window - window // 2
    padded = np.pad(image.transpose(1, 2, 0), ((before, after), (before, after), (0, 0)), mode="reflect")
    cells = [
        cv2.resize(padded[p.y : p.y + window, p.x : p.x + window], (size, size), interpolation=cv2.INTER_AREA)
        for p in points
    ]
    image_hash = hashlib.sha256(f"{image.shape}".encode() + image.tobytes()).hexdigest()
    return AnnotatedField(stem, points, image_hash, cells)


def _build_records(
    origin: str, fields: Sequence[AnnotatedField], notes: Sequence[str], window: int, size: int
) -> CellRecords:
    """A group is named after its first field."""
    first_field: dict[str, int] = {}
    group_of_field = [first_field.setdefault(f.image_hash, field_index) for field_index, f in enumerate(fields)]
    counts = [len(f.points) for f in fields]
    crops = [crop for f in fields for crop in f.cells]
    stems = [f.stem for f in fields]
    keys = {
        "group": KeyColumn(np.repeat(group_of_field, counts), tuple(f"group-{s}" for s in stems)),
        "field": KeyColumn(np.repeat(np.arange(len(fields)), counts), tuple(f"field-{s}" for s in stems)),
    }
    is_chula = all(s.isdecimal() and 1 <= int(s) <= LAST_FIELD_OF_BATCH[-1] for s in stems)
    if is_chula:
        keys["batch"] = KeyColumn(np.repeat(np.searchsorted(LAST_FIELD_OF_BATCH, [int(s) for s in stems]), counts))
    return CellRecords(
        origin=origin,
        cell_type=KeyColumn(np.array([p.cell_type for f in fields for p in f.points]), CHULA_TYPES),
        keys=keys,
        unit="group",
        is_repeat=_find_repeats(fields, group_of_field, window / 5),
        decode_pixels=partial(read_resized_cells, crops.__getitem__, size),
        batches=tuple(range(len(LAST_FIELD_OF_BATCH))) if is_chula else (),
        skipped=tuple(notes),
    )


def _find_repeats(fields: Sequence[AnnotatedField], group_of_field: Sequence[int], max_distance: float) -> np.ndarray:
    """(N,) bool: an earlier copy of the image has a point within `max_distance`. Annotators' clicks on a cell differ."""
    points_by_group: dict[int, list[CellAnnotation]] = {}
    is_repeat: list[bool] = []
    for field, g in zip(fields, group_of_field, strict=True):
        earlier_points = points_by_group.setdefault(g, [])
        is_repeat += [
            any((p.x - q.x) ** 2 + (p.y - q.y) ** 2 <= max_distance**2 for q in earlier_points) for p in field.points
        ]
        points_by_group[g] = [*earlier_points, *field.points]
    return np.array(is_repeat)


def _describe_skipped(
    origin: str, image_files: Mapping[str, Path], labels: Mapping[str, Sequence[CellAnnotation]]
) -> list[str]:
    reasons = {
        "without a label file": [s for s in image_files if s not in labels],
        "with an empty label file": [s for s, points in labels.items() if not points],
    }
    return [
        f"{origin}: fields {reason} left out: {', '.join(sorted(stems, key=_stem_sort_key)[:MAX_LISTED])}"
        + (f" and {len(stems) - MAX_LISTED} more" if len(stems) > MAX_LISTED else "")
        for reason, stems in reasons.items()
        if stems
    ]
