"""Reads cells packed into one .npz file (layout: docs/data.md). Never unpickles anything."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from sites.data.images import format_problems
from sites.data.manifest import UNIT_COLUMNS
from sites.data.smear.records import CHULA_TYPES, CellRecords, KeyColumn, PixelDecoder, values_in_several

CELL_SIDE_PIXELS = 72  # side of a JPEG cell
KEY_ARRAYS = (*UNIT_COLUMNS, "batch", "species", "field")
NAME_ARRAYS = ("class_names", "species_names", "field_names")
PIXEL_ARRAYS = ("images", "jpeg", "offset")
KNOWN_ARRAYS = frozenset({"labels", "type", "fold", "dup_of", *KEY_ARRAYS, *NAME_ARRAYS, *PIXEL_ARRAYS})
CELLS_PER_TASK = 256  # decoded by one task of the thread pool
MAX_UNPACKED_BYTES = 8 << 30  # of all arrays together
MAX_CELL_SIDE_PIXELS = 512  # of an uncompressed cell
JPEG_START_MARKER, JPEG_END_MARKER = (0xFF, 0xD8), (0xFF, 0xD9)  # every JPEG begins and ends with these


def read_cell_file(file: Path, size: int) -> CellRecords:
    """Checks everything except the pixels, which are decoded to `size` x `size` on demand."""
    arrays = _read_arrays(file)
    unit = next((u for u in UNIT_COLUMNS if u in arrays), None)
    pixels = ("images",) if "images" in arrays else ("jpeg", "offset")
    missing = [name for name in ("labels", "field", *pixels) if name not in arrays]
    missing += [] if unit else [" or ".join(UNIT_COLUMNS)]
    missing += [] if {"class_names", "type"} & arrays.keys() else ["class_names"]
    if unit is None or missing:
        raise DataError(f"{file} lacks {', '.join(missing)}; see 'Cell files' in docs/data.md for the required arrays")
    codes = arrays["type" if "type" in arrays else "labels"]
    count = codes.shape[0] if codes.ndim else 0
    if not count:
        raise DataError(f"{file} holds no cells; download it again")
    for name in sorted(arrays.keys() - {*NAME_ARRAYS, *PIXEL_ARRAYS}):
        _check_rows(file, name, arrays[name], count)
    names = {name: _read_names(file, name, arrays[name]) for name in NAME_ARRAYS if name in arrays}
    types = names.get("class_names", CHULA_TYPES)
    _check_range(file, "type" if "type" in arrays else "labels", codes, len(types))
    keys = {}
    for key in KEY_ARRAYS:
        if key in arrays:
            if f"{key}_names" in names:
                _check_range(file, key, arrays[key], len(names[f"{key}_names"]))
            keys[key] = KeyColumn(arrays[key], names.get(f"{key}_names"))
    _check_leaks(file, unit, arrays)
    _check_repeats(file, arrays.get("dup_of"))
    return CellRecords(
        origin=file.name,
        cell_type=KeyColumn(codes, types),
        keys=keys,
        unit=unit,
        is_repeat=arrays["dup_of"] >= 0 if "dup_of" in arrays else np.zeros(count, bool),
        decode_pixels=_uncompressed_decoder(file, arrays["images"], count, size)
        if "images" in arrays
        else _jpeg_decoder(file, arrays["jpeg"], arrays["offset"], count, size),
        fold=arrays.get("fold"),
        batches=tuple(np.unique(arrays["batch"]).tolist()) if "batch" in arrays else (),
    )


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Reads every array once: an npz file unpacks an array at each access."""
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file} is not an .npz file, or truncated; download it again, or correct data.file")
    arrays: dict[str, np.ndarray] = {}
    name = "the list of arrays"
    try:
        with zipfile.ZipFile(file) as zipped:
            if sum(entry.file_size for entry in zipped.infolist()) > MAX_UNPACKED_BYTES:
                raise DataError(f"more than {MAX_UNPACKED_BYTES >> 30} GB unpacked")
        with np.load(file, allow_pickle=False) as packed:
            for name in sorted(KNOWN_ARRAYS & set(packed.files)):
                arrays[name] = packed[name]
    except Exception as error:  # a damaged zip can raise anything inside zipfile, zlib and numpy
        raise DataError(
            f"{file}: {name} cannot be read ({error or type(error).__name__}); the file is damaged or not a cell file: "
            "download it again, or correct data.file"
        ) from error
    return arrays


def _check_rows(file: Path, name: str, values: np.ndarray, count: int) -> None:
    if values.shape != (count,) or values.dtype.kind not in "iu":
        raise DataError(
            f"{file}: {name} is {values.dtype} of shape {values.shape}, not integers of shape ({count},); "
            "pack the file again"
        )


def _check_range(file: Path, name: str, values: np.ndarray, count: int) -> None:
    out_of_range = np.flatnonzero((values < 0) | (values >= count))
    if len(out_of_range):
        found = format_problems([f"row {row}: {name} {values[row]}" for row in out_of_range])
        raise DataError(f"{file}: {name} must be in 0..{count - 1}; correct these and pack the file again:{found}")


def _check_leaks(file: Path, unit: str, arrays: Mapping[str, np.ndarray]) -> None:
    """A unit in both train and test would make test results too optimistic."""
    for inner, outer in (("field", unit), (unit, "fold")):
        if outer in arrays and len(leaking := values_in_several(arrays[inner], arrays[outer])):
            raise DataError(
                f"{file}: these are in more than one {outer}, so test cells could leak into training; assign each "
                f"to one:{format_problems([f'{inner} {v}' for v in leaking])}"
            )


def _check_repeats(file: Path, dup_of: np.ndarray | None) -> None:
    if dup_of is None:
        return
    invalid = np.flatnonzero((dup_of < -1) | (dup_of >= len(dup_of)) | (dup_of == np.arange(len(dup_of))))
    if len(invalid):
        found = format_problems([f"row {row}: dup_of {dup_of[row]}" for row in invalid])
        raise DataError(f"{file}: dup_of must be -1 or another row; correct these and pack the file again:{found}")


def _read_names(file: Path, name: str, values: np.ndarray) -> tuple[str, ...]:
    names = tuple(map(str, values)) if values.ndim == 1 and values.dtype.kind == "U" else ()
    if not names or len(set(names)) < len(names):
        raise DataError(f"{file}: {name} is not a list of distinct names; pack the file again")
    return names


def _uncompressed_decoder(file: Path, images: np.ndarray, count: int, size: int) -> PixelDecoder:
    if (
        images.dtype != np.uint8
        or images.ndim != 4
        or images.shape != (count, images.shape[1] or 1, images.shape[1], 3)
        or images.shape[1] > MAX_CELL_SIDE_PIXELS
    ):
        raise DataError(
            f"{file}: images is {images.dtype} of shape {images.shape}, not uint8 of shape ({count}, size, size, 3) "
            f"with a size of at most {MAX_CELL_SIDE_PIXELS}; pack the file again"
        )
    return partial(read_resized_cells, images.__getitem__, size)


def _jpeg_decoder(file: Path, jpeg: np.ndarray, offset: np.ndarray, count: int, size: int) -> PixelDecoder:
    if jpeg.ndim != 1 or jpeg.dtype != np.uint8:
        raise DataError(f"{file}: jpeg is {jpeg.dtype} of shape {jpeg.shape}, not a row of bytes; pack the file again")
    _check_rows(file, "offset", offset, count + 1)
    start, end = offset[:-1].astype(np.int64), offset[1:].astype(np.int64)
    outside = (start < 0) | (end > len(jpeg)) | (end - start < 4)
    if outside.any():
        found = format_problems(
            [f"row {r}: bytes {start[r]} to {end[r]} of {len(jpeg)}" for r in np.flatnonzero(outside)]
        )
        raise DataError(f"{file}: offset must ascend within jpeg; it is damaged; download the file again:{found}")
    # libjpeg fills a truncated image with grey and warns on stderr only
    is_complete = (
        (jpeg[start] == JPEG_START_MARKER[0])
        & (jpeg[start + 1] == JPEG_START_MARKER[1])
        & (jpeg[end - 2] == JPEG_END_MARKER[0])
        & (jpeg[end - 1] == JPEG_END_MARKER[1])
    )
    if not is_complete.all():
        found = format_problems([f"row {r}: incomplete JPEG" for r in np.flatnonzero(~is_complete)])
        raise DataError(f"{file}: these cells are damaged; download the file again:{found}")
    return partial(read_resized_cells, partial(_decode_jpeg, file, jpeg, start, end), size)


def _decode_jpeg(file: Path, jpeg: np.ndarray, start: np.ndarray, end: np.ndarray, row: int) -> np.ndarray:
    """(72, 72, 3) RGB"""
    import cv2

    encoded = jpeg[start[row] : end[row]]
    size = read_jpeg_size(encoded.tobytes())  # a few kB can unpack to gigabytes
    try:
        cell = cv2.imdecode(encoded, cv2.IMREAD_COLOR) if size == (CELL_SIDE_PIXELS, CELL_SIDE_PIXELS) else None
    except cv2.error:
        cell = None
    if cell is None:
        problem = (
            f"{size[0]} x {size[1]} pixels"
            if size and size != (CELL_SIDE_PIXELS, CELL_SIDE_PIXELS)
            else "a JPEG that does not decode"
        )
        raise DataError(
            f"{file}, row {row}: {problem}, not a cell of {CELL_SIDE_PIXELS} x {CELL_SIDE_PIXELS}; download the file again"
        )
    rgb: np.ndarray = cv2.cvtColor(cell, cv2.COLOR_BGR2RGB)
    return rgb


def read_jpeg_size(jpeg: bytes) -> tuple[int, int] | None:
    """Width and height from the start-of-frame segment of the header."""
    position = 2
    while position + 9 <= len(jpeg) and jpeg[position] == 0xFF:
        marker, length = jpeg[position + 1], int.from_bytes(jpeg[position + 2 : position + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # those are tables
            return int.from_bytes(jpeg[position + 7 : position + 9], "big"), int.from_bytes(
                jpeg[position + 5 : position + 7], "big"
            )
        position += 2 + length
    return None


def read_resized_cells(read_cell: Callable[[int], np.ndarray], size: int, rows: np.ndarray) -> np.ndarray:
    """(n, 3, size, size) uint8: `read_cell(row)` gives (h, w, 3), resized by area. In threads: OpenCV releases the GIL."""
    import cv2

    out = np.empty((len(rows), 3, size, size), np.uint8)

    def fill_chunk(first: int) -> None:
        for index, row in enumerate(rows[first : first + CELLS_PER_TASK].tolist(), first):
            pixels = read_cell(row)
            if pixels.shape[0] != size:
                pixels = cv2.resize(pixels, (size, size), interpolation=cv2.INTER_AREA)
            out[index] = pixels.transpose(2, 0, 1)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill_chunk, range(0, len(rows), CELLS_PER_TASK)))
    return out
