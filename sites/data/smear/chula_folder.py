"""A folder laid out as Chula-RBC-12: pictures `Dataset/N.jpg`, and `Label/N.txt` with a line `x y type` for each cell.

A cell is the window about its point, mirrored at the picture's border. The layout names no slide and no patient:
pictures that are equal in every pixel share a group, any other picture is a group of its own. Views that overlap in
part, and one view saved or exposed twice, are NOT found: who has such, or several pictures of one patient, lists
the cells in a manifest (source `folder`) and names the patient there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.core.errors import BadData
from sites.data.images import SHOWN, SUFFIXES, decode_all, listing
from sites.data.smear.npz_file import fill
from sites.data.smear.records import CHULA, Cells, Column

FOLDERS = ("Dataset", "Label")
LAST = (60, 231, 422, 706, 738)  # Chula's last field of each batch: where the background's colour shifts
AT_ONCE = 8  # pictures in memory


@dataclass(frozen=True)
class Point:
    x: int
    y: int
    type: int
    line: int


@dataclass(frozen=True)
class Field:
    stem: str
    points: Sequence[Point]
    picture: str  # hash of its pixels
    cells: Sequence[np.ndarray]  # (size, size, 3) RGB


def read_folder(folder: Path, window: int, size: int) -> Cells:
    problems: list[str] = []
    pictures = _pictures(folder / "Dataset", problems)
    texts = [f for f in _visible(folder / "Label", problems) if f.suffix.lower() == ".txt"]
    labels = {f.stem: _points(f, problems) for f in texts}
    problems += [
        f"Label/{s}.txt: Dataset has no picture {s}" for s, points in labels.items() if points and s not in pictures
    ]
    stems = sorted((s for s, points in labels.items() if points and s in pictures), key=_order)
    fields = []
    for first in range(0, len(stems), AT_ONCE):
        part = stems[first : first + AT_ONCE]
        for stem, image in zip(part, decode_all([pictures[s] for s in part], 3), strict=True):
            shown = f"Dataset/{pictures[stem].name}"
            if isinstance(image, str):
                problems.append(f"{shown}: {image}")
            elif min(image.shape[1:]) < window:
                problems.append(
                    f"{shown}: {image.shape[2]} x {image.shape[1]} pixels, less than data.window = {window}"
                )
            elif outside := [p for p in labels[stem] if p.x >= image.shape[2] or p.y >= image.shape[1]]:
                where = f"outside the picture of {image.shape[2]} x {image.shape[1]}"
                problems += [f"Label/{stem}.txt, line {p.line}: {p.x} {p.y} is {where}" for p in outside]
            else:
                fields.append(_field(stem, labels[stem], image, window, size))
    if problems:
        raise BadData(f"{folder}: correct these, or take them out of Dataset and Label:{listing(problems)}")
    if not fields:
        raise BadData(f"{folder}: no picture in Dataset has a line in Label; write `x y type` there for each cell")
    origin = folder.resolve().name
    return _cells(origin, fields, _told(origin, pictures, labels), window, size)


def _pictures(folder: Path, problems: list[str]) -> dict[str, Path]:
    files = [file for file in _visible(folder, problems) if file.suffix.lower() in SUFFIXES]
    found = {file.stem: file for file in files}
    problems += [
        f"Dataset/{file.name}: {found[file.stem].name} is called the same; rename one"
        for file in files
        if found[file.stem] != file
    ]
    return found


def _visible(folder: Path, problems: list[str]) -> list[Path]:
    """Regular files that lie in the folder: reading a pipe would wait for ever, and a link may lead anywhere."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    good = [f for f in files if f.is_file() and f.resolve().parent == folder.resolve()]
    problems += [f"{folder.name}/{f.name}: no regular file of this folder" for f in files if f not in good]
    return good


def _points(file: Path, problems: list[str]) -> list[Point]:
    try:
        lines = file.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"Label/{file.name}: cannot be read as text ({error})")
        return []
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 3 or not all(word.isdecimal() and len(word) < 10 for word in words):
            problems.append(f"Label/{file.name}, line {number}: {line[:40]!r} is no `x y type` of whole numbers")
        elif int(words[2]) >= len(CHULA):
            problems.append(f"Label/{file.name}, line {number}: type {words[2]} is not in 0..{len(CHULA) - 1}")
        else:
            found.append(Point(int(words[0]), int(words[1]), int(words[2]), number))
    first: dict[tuple[int, int], int] = {}
    problems += [
        f"Label/{file.name}, line {p.line}: {p.x} {p.y} is already on line {first[p.x, p.y]}"
        for p in found
        if first.setdefault((p.x, p.y), p.line) != p.line
    ]
    return found


def _order(stem: str) -> tuple[int, str]:
    return (int(stem), stem) if stem.isdecimal() else (-1, stem)


def _field(stem: str, points: Sequence[Point], image: np.ndarray, window: int, size: int) -> Field:
    import cv2

    before, after = window // 2, window - window // 2
    padded = np.pad(image.transpose(1, 2, 0), ((before, after), (before, after), (0, 0)), mode="reflect")
    cells = [
        cv2.resize(padded[p.y : p.y + window, p.x : p.x + window], (size, size), interpolation=cv2.INTER_AREA)
        for p in points
    ]
    picture = hashlib.sha256(f"{image.shape}".encode() + image.tobytes()).hexdigest()
    return Field(stem, points, picture, cells)


def _cells(origin: str, fields: Sequence[Field], told: Sequence[str], window: int, size: int) -> Cells:
    """A group is called by the first of its fields."""
    first: dict[str, int] = {}
    group = [first.setdefault(f.picture, number) for number, f in enumerate(fields)]
    counts = [len(f.points) for f in fields]
    crops = [crop for f in fields for crop in f.cells]
    stems = [f.stem for f in fields]
    keys = {
        "group": Column(np.repeat(group, counts), tuple(f"group-{s}" for s in stems)),
        "field": Column(np.repeat(np.arange(len(fields)), counts), tuple(f"field-{s}" for s in stems)),
    }
    chula = all(s.isdecimal() and 1 <= int(s) <= LAST[-1] for s in stems)
    if chula:
        keys["batch"] = Column(np.repeat(np.searchsorted(LAST, [int(s) for s in stems]), counts))
    return Cells(
        origin=origin,
        type=Column(np.array([p.type for f in fields for p in f.points]), CHULA),
        keys=keys,
        unit="group",
        repeat=_repeats(fields, group, window / 5),
        pixels=partial(fill, crops.__getitem__, size),
        batches=tuple(range(len(LAST))) if chula else (),
        skipped=tuple(told),
    )


def _repeats(fields: Sequence[Field], group: Sequence[int], near: float) -> np.ndarray:
    """(N,) bool: an earlier copy of the picture has a point so near. Two people's clicks on one cell differ a little."""
    seen: dict[int, list[Point]] = {}
    found: list[bool] = []
    for field, g in zip(fields, group, strict=True):
        known = seen.setdefault(g, [])
        found += [any((p.x - q.x) ** 2 + (p.y - q.y) ** 2 <= near**2 for q in known) for p in field.points]
        seen[g] = [*known, *field.points]
    return np.array(found)


def _told(origin: str, pictures: Mapping[str, Path], labels: Mapping[str, Sequence[Point]]) -> list[str]:
    reasons = {
        "without a label file": [s for s in pictures if s not in labels],
        "with an empty label file": [s for s, points in labels.items() if not points],
    }
    return [
        f"{origin}: fields {reason} left out: {', '.join(sorted(stems, key=_order)[:SHOWN])}"
        + (f" and {len(stems) - SHOWN} more" if len(stems) > SHOWN else "")
        for reason, stems in reasons.items()
        if stems
    ]
