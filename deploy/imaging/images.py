"""Reads images on an edge machine with numpy and Pillow (and pydicom for DICOM files), without torch or OpenCV.

The content decides on the format, never the suffix. Pixels are decoded as on the training side (sites/data/images.py),
always to (H, W, 3): a gray image has three equal channels. Invalid bytes of any kind raise DataError.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from deploy.imaging.input_image import WARNINGS_LOCK, InputImage
from pipeline.core.errors import DataError
from sites.data.images import IMAGE_SUFFIXES, decode_image_stream

SAVE_AGAIN_HINT = "save it again as PNG, JPEG, TIFF, BMP or DICOM"
MAX_FILE_BYTES = 2 * 2**30
REPORT_FILES = ("report.html", "cells.csv")  # a folder with both holds our overlays, not fields
STDIN_PATH = Path("-")

# (offset, magic, what it is and the cure)
UNSUPPORTED_FORMATS = (
    (0, b"GIF8", "a GIF; save the image as PNG, each frame of an animation as its own file"),
    (8, b"WEBP", "a WebP; save it as PNG"),
    (4, b"ftyp", "a HEIC or AVIF photo or a video; save a still image as PNG or JPEG"),
    (0, b"\0\0\0\x0cjP", "a JPEG 2000 file; save it as PNG, or wrap it as DICOM"),
    (0, b"\xff\x4f\xff\x51", "a JPEG 2000 stream; save it as PNG, or wrap it as DICOM"),
    (0, b"%PDF", "a PDF; export the images in it as PNG"),
    (0, b"%!PS", "PostScript, which is never run; save the image as PNG"),
    (0, b"PK\x03\x04", "a zip archive; unpack it and give the folder"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it first"),
    (0, b"II\x2b\0", "a BigTIFF, usually a whole slide; export the fields as PNG or DICOM"),
    (0, b"MM\0\x2b", "a BigTIFF, usually a whole slide; export the fields as PNG or DICOM"),
)
# First tags of DICOM files without preamble: (0002,xxxx) or (0008,xxxx) in little endian, (0008,xxxx) in big endian.
FILE_META_ELEMENTS, IDENTITY_ELEMENTS = (
    (0x00, 0x01, 0x02, 0x03, 0x10),
    (0x00, 0x01, 0x05, 0x06, 0x08, 0x12, 0x13, 0x14, 0x16, 0x18, 0x20),
)
DICOM_FIRST_TAGS = frozenset(
    [bytes([2, 0, e, 0]) for e in FILE_META_ELEMENTS]
    + [t for e in IDENTITY_ELEMENTS for t in (bytes([8, 0, e, 0]), bytes([0, 8, 0, e]))]
)


def iter_image_files(paths: Sequence[Path]) -> Iterator[tuple[str, list[InputImage] | str]]:
    """The name of each file with its images, or with the reason why it cannot be read. `-` is standard input."""
    for path in paths:
        if path == STDIN_PATH:
            yield "-", _read_or_reason(path)
            continue
        files = list(expand_paths([path]))
        if not files:
            yield printable_path(path), "no such file" if not path.exists() else "no image in this folder"
        for file in files:
            yield printable_path(file), _read_or_reason(file)


def _read_or_reason(path: Path) -> list[InputImage] | str:
    try:
        return read_image_bytes(sys.stdin.buffer.read(), "-") if path == STDIN_PATH else read_image_file(path)
    except DataError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def read_image_file(path: Path) -> list[InputImage]:
    """One image, or the frames of a DICOM file."""
    try:
        if not path.is_file():  # reading a named pipe would block
            raise DataError(
                f"{path}: not a file; give an image" if path.exists() else f"{path}: no such file; check its name"
            )
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DataError(f"{path}: {size / 2**30:.1f} GiB; split it, the limit is {MAX_FILE_BYTES // 2**30} GiB")
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check its name, its permissions and the disk"
        ) from error
    return _decode_images(data, printable_path(path), path)


def printable_path(path: Path) -> str:
    """The path as valid UTF-8; file names on old disks may have another encoding."""
    return os.fsencode(path).decode("utf-8", "replace")


def read_image_bytes(data: bytes, name: str) -> list[InputImage]:
    """Like `read_image_file` for bytes; results cannot refer to DICOM bytes without a file."""
    return _decode_images(data, name, None)


def _decode_images(data: bytes, name: str, path: Path | None) -> list[InputImage]:
    if not data:
        raise DataError(f"{name}: empty; export or copy it again")
    if is_dicom(data):
        try:
            from deploy.imaging.dicom_reader import read_dicom  # loads pydicom only if needed
        except ImportError as error:
            raise DataError(f"{name}: DICOM needs pydicom; pip install 'hemofed[edge-smear]'") from error
        return read_dicom(data, name, path)
    for offset, magic, advice in UNSUPPORTED_FORMATS:
        if data[offset : offset + len(magic)] == magic:
            raise DataError(f"{name}: {advice}")
    with WARNINGS_LOCK, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about metadata; damaged pixels raise
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
    """Whether the bytes have DICOM's magic, or begin with a tag that no other format or text begins with."""
    if data[128:132] == b"DICM":
        return True
    return data[:4] in DICOM_FIRST_TAGS and len(data) > 132  # the parser then requires a SOP class, or rows and pixels


def expand_paths(paths: Sequence[Path]) -> Iterator[Path]:
    """Yields files as given, and a folder's possible images in sorted order, without hidden files and our reports."""
    for path in paths:
        try:
            candidates = sorted(p for p in path.rglob("*") if _is_candidate(p, path)) if path.is_dir() else [path]
        except OSError as error:
            raise DataError(
                f"{path}: cannot be listed ({error.strerror}); check its permissions and the disk"
            ) from error
        yield from candidates


def _is_candidate(path: Path, folder: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(folder).parts) or not path.is_file():
        return False
    if all((path.parent / name).is_file() for name in REPORT_FILES):
        return False
    if path.suffix:
        # archives name instances by UID, such as 1.2.840.113: the suffix is a number
        return path.suffix.lower() in IMAGE_SUFFIXES | {".dcm"} or (
            path.suffix[1:].isdigit() and _has_dicom_magic(path)
        )
    return _has_dicom_magic(path)


def _has_dicom_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return True  # reading it later gives the reason
