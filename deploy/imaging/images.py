"""Pictures on an edge machine: numpy and Pillow, and pydicom once a DICOM file is met; no torch, no OpenCV.

What bytes hold is told by the bytes, never by a suffix. Pixels come out as the training side sees them (sites/data/images.py),
always (H, W, 3): a grey picture has three equal channels. Whatever the bytes are, the only error is BadData.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.core.errors import DataError
from sites.data.images import IMAGE_SUFFIXES, decode_image_stream

SAVE_AGAIN_HINT = "save it again as PNG, JPEG, TIFF, BMP or DICOM"
MAX_FILE_BYTES = 2 * 2**30
REPORT_FILES = ("report.html", "cells.csv")  # pictures beside both are drawings of ours, not fields
# Filters of warnings belong to the process: two threads that set and restore them would leave the wrong ones behind.
WARNINGS_LOCK = threading.RLock()

# What people hand over by mistake, and what to do with it.
UNSUPPORTED_FORMATS = (
    (0, b"GIF8", "a GIF; save the picture as PNG, each image of an animation as a file of its own"),
    (8, b"WEBP", "a WebP; save it as PNG"),
    (4, b"ftyp", "a HEIC or AVIF photo or a film; save a still picture as PNG or JPEG"),
    (0, b"\0\0\0\x0cjP", "a JPEG 2000 file; save it as PNG, or wrap it as DICOM"),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 stream; save it as PNG, or wrap it as DICOM"),
    (0, b"%PDF", "a PDF; export the pictures in it as PNG"),
    (0, b"%!PS", "PostScript, which is never run; save the picture as PNG"),
    (0, b"PK\x03\x04", "a zip archive; unpack it and give the folder"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it first"),
    (0, b"II\x2b\0", "a BigTIFF, mostly a whole slide; export the fields to be read as PNG or DICOM"),
    (0, b"MM\0\x2b", "a BigTIFF, mostly a whole slide; export the fields to be read as PNG or DICOM"),
)
# Of DICOM without its magic: (0002,xxxx) or (0008,xxxx) in little endian, (0008,xxxx) in big.
FILE_META_ELEMENTS, IDENTITY_ELEMENTS = (
    (0x00, 0x01, 0x02, 0x03, 0x10),
    (0x00, 0x01, 0x05, 0x06, 0x08, 0x12, 0x13, 0x14, 0x16, 0x18, 0x20),
)
DICOM_FIRST_TAGS = frozenset(
    [bytes([2, 0, e, 0]) for e in FILE_META_ELEMENTS]
    + [t for e in IDENTITY_ELEMENTS for t in (bytes([8, 0, e, 0]), bytes([0, 8, 0, e]))]
)


@dataclass(frozen=True)
class InputImage:
    name: str  # path as given, or "-" for stdin; for frames "path#3"
    pixels: np.ndarray  # (H, W, 3) uint8 RGB
    dicom_path: Path | None = None  # the DICOM file it came from (results refer to it); None for others
    frame_number: int = 1


def read_image_file(path: Path) -> list[InputImage]:
    """A picture, or the frames of a DICOM file."""
    try:
        if not path.is_file():  # reading a named pipe would wait for ever
            raise DataError(
                f"{path}: not a file; give a picture" if path.exists() else f"{path}: no such file; check its name"
            )
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DataError(f"{path}: {size / 2**30:.1f} GiB; split it, at most {MAX_FILE_BYTES // 2**30} GiB are read")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check its name, its rights and the disk"
        ) from error
    return _decode_images(data, printable_path(path), path)


def printable_path(path: Path) -> str:
    """A name that can be written down: old disks have letters in other codes."""
    return os.fsencode(path).decode("utf-8", "replace")


def read_image_bytes(data: bytes, name: str) -> list[InputImage]:
    """As `read_path`, of bytes; results of DICOM bytes have no file to refer to."""
    return _decode_images(data, name, None)


def _decode_images(data: bytes, name: str, path: Path | None) -> list[InputImage]:
    if not data:
        raise DataError(f"{name}: empty; export or copy it again")
    if is_dicom(data):
        try:
            from deploy.imaging.dicom_reader import read_dicom  # pydicom is paid for by those who have DICOM
        except ImportError as error:
            raise DataError(f"{name}: DICOM needs pydicom; pip install 'hemofed[edge-smear]'") from error
        return read_dicom(data, name, path)
    for offset, magic, advice in UNSUPPORTED_FORMATS:
        if data[offset : offset + len(magic)] == magic:
            raise DataError(f"{name}: {advice}")
    with WARNINGS_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # odd metadata; damaged pixels raise
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            pixels = decode_image_stream(io.BytesIO(data), 3)
        except DataError as error:
            reason = str(error)
            raise DataError(f"{name}: {reason}" + ("" if ";" in reason else f"; {SAVE_AGAIN_HINT}")) from error
        except MemoryError as error:
            raise DataError(f"{name}: too large for this machine's memory; cut it into tiles") from error
    return [InputImage(name, np.ascontiguousarray(pixels.transpose(1, 2, 0)))]


def is_dicom(data: bytes) -> bool:
    """By its magic; without one, by a first tag that other formats and texts do not begin with."""
    if data[128:132] == b"DICM":
        return True
    return data[:4] in DICOM_FIRST_TAGS and len(data) > 132  # the parser then wants a SOP class, or rows and pixels


def expand_paths(paths: Sequence[Path]) -> Iterator[Path]:
    """Files as given; of folders, all that may be pictures, sorted; hidden ones and our own reports are left out."""
    for path in paths:
        try:
            candidates = sorted(p for p in path.rglob("*") if _is_candidate(p, path)) if path.is_dir() else [path]
        except OSError as error:
            raise DataError(f"{path}: cannot be listed ({error.strerror}); check its rights and the disk") from error
        yield from candidates


def _is_candidate(path: Path, folder: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(folder).parts) or not path.is_file():
        return False
    if all((path.parent / name).is_file() for name in REPORT_FILES):
        return False
    if path.suffix:
        # 1.2.840.113 is how archives name instances: what looks like a suffix is a number
        return path.suffix.lower() in IMAGE_SUFFIXES | {".dcm"} or (
            path.suffix[1:].isdigit() and _has_dicom_magic(path)
        )
    return _has_dicom_magic(path)


def _has_dicom_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return True  # whoever reads it says why it cannot be read
