"""Cells packed into one .npz: the layout is told in docs/data.md. Nothing in it is ever unpickled."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.core.errors import BadData
from sites.data.images import listing
from sites.data.manifest import UNITS
from sites.data.smear.records import CHULA, Cells, Column, Pixels, shared

WINDOW = 72  # pixels of a packed cell
KEYS = (*UNITS, "batch", "species", "field")
NAMES = ("class_names", "species_names", "field_names")
PIXELS = ("images", "jpeg", "offset")
KNOWN = frozenset({"labels", "type", "fold", "dup_of", *KEYS, *NAMES, *PIXELS})
CHUNK = 256  # cells a thread takes at a time
LIMIT = 8 << 30  # bytes that a file may unpack to
LARGEST = 512  # pixels a side of a plain cell
START, END = (0xFF, 0xD8), (0xFF, 0xD9)  # of every JPEG


def read_cells(file: Path, size: int) -> Cells:
    arrays = _arrays(file)
    unit = next((u for u in UNITS if u in arrays), None)
    pixels = ("images",) if "images" in arrays else ("jpeg", "offset")
    lacking = [name for name in ("labels", "field", *pixels) if name not in arrays]
    lacking += [] if unit else [" or ".join(UNITS)]
    lacking += [] if {"class_names", "type"} & arrays.keys() else ["class_names"]
    if unit is None or lacking:
        raise BadData(f"{file} lacks {', '.join(lacking)}; see 'Cell files' in docs/data.md for what it has to hold")
    codes = arrays["type" if "type" in arrays else "labels"]
    count = codes.shape[0] if codes.ndim else 0
    if not count:
        raise BadData(f"{file} holds no cells; fetch it again")
    for name in sorted(arrays.keys() - {*NAMES, *PIXELS}):
        _check_rows(file, name, arrays[name], count)
    names = {name: _names(file, name, arrays[name]) for name in NAMES if name in arrays}
    types = names.get("class_names", CHULA)
    _check_range(file, "type" if "type" in arrays else "labels", codes, len(types))
    keys = {}
    for key in KEYS:
        if key in arrays:
            if f"{key}_names" in names:
                _check_range(file, key, arrays[key], len(names[f"{key}_names"]))
            keys[key] = Column(arrays[key], names.get(f"{key}_names"))
    _check_leaks(file, unit, arrays)
    _check_repeats(file, arrays.get("dup_of"))
    return Cells(
        origin=file.name,
        type=Column(codes, types),
        keys=keys,
        unit=unit,
        repeat=arrays["dup_of"] >= 0 if "dup_of" in arrays else np.zeros(count, bool),
        pixels=_plain(file, arrays["images"], count, size)
        if "images" in arrays
        else _packed(file, arrays["jpeg"], arrays["offset"], count, size),
        fold=arrays.get("fold"),
        batches=tuple(np.unique(arrays["batch"]).tolist()) if "batch" in arrays else (),
    )


def _arrays(file: Path) -> dict[str, np.ndarray]:
    """Each is read once: an npz unpacks an array again whenever it is asked for."""
    if not zipfile.is_zipfile(file):
        raise BadData(f"{file} is no .npz file, or one that was cut short; fetch it again, or correct data.file")
    found: dict[str, np.ndarray] = {}
    name = "the list of arrays"
    try:
        with zipfile.ZipFile(file) as zipped:
            if sum(entry.file_size for entry in zipped.infolist()) > LIMIT:
                raise BadData(f"more than {LIMIT >> 30} GB unpacked")
        with np.load(file, allow_pickle=False) as packed:
            for name in sorted(KNOWN & set(packed.files)):
                found[name] = packed[name]
    except Exception as error:  # a damaged zip can raise anything inside zipfile, zlib and numpy
        raise BadData(
            f"{file}: {name} cannot be read ({error or type(error).__name__}); the file is damaged or no cell file: "
            "fetch it again, or correct data.file"
        ) from error
    return found


def _check_rows(file: Path, name: str, values: np.ndarray, count: int) -> None:
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise BadData(
            f"{file}: {name} is {values.dtype} of shape {values.shape}, not whole numbers of shape ({count},); "
            "pack the file again"
        )


def _check_range(file: Path, name: str, values: np.ndarray, count: int) -> None:
    bad = np.flatnonzero((values < 0) | (values >= count))
    if len(bad):
        found = listing([f"row {row}: {name} {values[row]}" for row in bad])
        raise BadData(f"{file}: {name} must lie in 0..{count - 1}; correct these and pack the file again:{found}")


def _check_leaks(file: Path, unit: str, arrays: Mapping[str, np.ndarray]) -> None:
    """A unit on both sides of a split would make the test too good."""
    for inner, outer in (("field", unit), (unit, "fold")):
        if outer in arrays and len(found := shared(arrays[inner], arrays[outer])):
            raise BadData(
                f"{file}: these are in more than one {outer}, which would let test cells into training; give each of "
                f"them one:{listing([f'{inner} {v}' for v in found])}"
            )


def _check_repeats(file: Path, dup_of: np.ndarray | None) -> None:
    if dup_of is None:
        return
    bad = np.flatnonzero((dup_of < -1) | (dup_of >= len(dup_of)) | (dup_of == np.arange(len(dup_of))))
    if len(bad):
        found = listing([f"row {row}: dup_of {dup_of[row]}" for row in bad])
        raise BadData(f"{file}: dup_of must be -1 or another row; correct these and pack the file again:{found}")


def _names(file: Path, name: str, values: np.ndarray) -> tuple[str, ...]:
    names = tuple(map(str, values)) if values.ndim == 1 and values.dtype.kind == "U" else ()
    if not names or len(set(names)) < len(names):
        raise BadData(f"{file}: {name} is no list of different names; pack the file again")
    return names


def _plain(file: Path, images: np.ndarray, count: int, size: int) -> Pixels:
    if (
        images.dtype != np.uint8
        or images.ndim != 4
        or images.shape != (count, images.shape[1] or 1, images.shape[1], 3)
        or images.shape[1] > LARGEST
    ):
        raise BadData(
            f"{file}: images is {images.dtype} of shape {images.shape}, not uint8 of shape ({count}, size, size, 3) with a size of at most {LARGEST}; "
            "pack the file again"
        )
    return partial(fill, images.__getitem__, size)


def _packed(file: Path, jpeg: np.ndarray, offset: np.ndarray, count: int, size: int) -> Pixels:
    if jpeg.ndim != 1 or jpeg.dtype != np.uint8:
        raise BadData(f"{file}: jpeg is {jpeg.dtype} of shape {jpeg.shape}, not a row of bytes; pack the file again")
    _check_rows(file, "offset", offset, count + 1)
    start, end = offset[:-1].astype(np.int64), offset[1:].astype(np.int64)
    outside = (start < 0) | (end > len(jpeg)) | (end - start < 4)
    if outside.any():
        found = listing([f"row {r}: bytes {start[r]} to {end[r]} of {len(jpeg)}" for r in np.flatnonzero(outside)])
        raise BadData(f"{file}: offset must ascend within jpeg; it is damaged, so fetch the file again:{found}")
    # libjpeg fills up a picture that ends early with grey and says so on stderr only
    whole = (
        (jpeg[start] == START[0])
        & (jpeg[start + 1] == START[1])
        & (jpeg[end - 2] == END[0])
        & (jpeg[end - 1] == END[1])
    )
    if not whole.all():
        found = listing([f"row {r}: no whole JPEG" for r in np.flatnonzero(~whole)])
        raise BadData(f"{file}: these cells are damaged; fetch the file again:{found}")
    return partial(fill, partial(_unpack, file, jpeg, start, end), size)


def _unpack(file: Path, jpeg: np.ndarray, start: np.ndarray, end: np.ndarray, row: int) -> np.ndarray:
    """(72, 72, 3) RGB"""
    import cv2

    packed = jpeg[start[row] : end[row]]
    size = said_size(packed.tobytes())  # a kilobyte can unpack to gigabytes
    try:
        cell = cv2.imdecode(packed, cv2.IMREAD_COLOR) if size == (WINDOW, WINDOW) else None
    except cv2.error:
        cell = None
    if cell is None:
        found = f"{size[0]} x {size[1]} pixels" if size and size != (WINDOW, WINDOW) else "a JPEG that does not decode"
        raise BadData(f"{file}, row {row}: {found}, not a cell of {WINDOW} x {WINDOW}; fetch the file again")
    rgb: np.ndarray = cv2.cvtColor(cell, cv2.COLOR_BGR2RGB)
    return rgb


def said_size(jpeg: bytes) -> tuple[int, int] | None:
    """Width and height as the header's start-of-frame segment says."""
    at = 2
    while at + 9 <= len(jpeg) and jpeg[at] == 0xFF:
        kind, length = jpeg[at + 1], int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # those are tables
            return int.from_bytes(jpeg[at + 7 : at + 9], "big"), int.from_bytes(jpeg[at + 5 : at + 7], "big")
        at += 2 + length
    return None


def fill(cell: Callable[[int], np.ndarray], size: int, rows: np.ndarray) -> np.ndarray:
    """(n, 3, size, size) uint8 of `cell(row)`, each (h, w, 3), by area, in threads: OpenCV lets others run meanwhile."""
    import cv2

    out = np.empty((len(rows), 3, size, size), np.uint8)

    def part(first: int) -> None:
        for at, row in enumerate(rows[first : first + CHUNK].tolist(), first):
            pixels = cell(row)
            if pixels.shape[0] != size:
                pixels = cv2.resize(pixels, (size, size), interpolation=cv2.INTER_AREA)
            out[at] = pixels.transpose(2, 0, 1)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(part, range(0, len(rows), CHUNK)))
    return out
