"""Reads the headers of JPEG, JPEG-LS and JPEG 2000 codestreams, and decodes 8-bit JPEG with the right color space."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from pydicom.pixels.processing import convert_color_space

from pipeline.core.errors import DataError

STREAM_SIGNATURES = (
    b"\xff\xd8\xff",
    b"\xff\x4f\xff\x51",
    b"\0\0\0\x0cjP",
)  # JPEG and JPEG-LS; JPEG 2000; that in a box
COPY_AGAIN_HINT = "copy or export it again"


@dataclass(frozen=True)
class CodestreamHeader:
    rows: int
    columns: int
    samples_per_pixel: int
    bits_per_sample: int
    has_color_transform: bool = False  # JPEG 2000: the decoder inverts the transform and returns RGB
    is_ycbcr: bool = False  # JPEG: lossy, and its markers do not indicate RGB


def read_codestream_header(data: bytes) -> CodestreamHeader:
    # Only padding may follow the end marker; without the marker the frame is truncated.
    if b"\xff\xd9" not in data[-16:]:
        raise DataError(f"a compressed frame is truncated; {COPY_AGAIN_HINT}")
    try:
        if data.startswith(b"\xff\xd8"):
            return _parse_jpeg_header(data)
        return _parse_j2k_header(data)
    except IndexError:
        raise DataError(f"the compressed pixels end inside their header; {COPY_AGAIN_HINT}") from None


def _parse_jpeg_header(data: bytes) -> CodestreamHeader:
    offset, adobe_transform = 2, -1
    while True:
        while data[offset] == 0xFF and data[offset + 1] == 0xFF:  # fill bytes
            offset += 1
        marker, length = data[offset + 1], _read_uint(data, offset + 2, 2)
        if data[offset] != 0xFF or length < 2 or marker == 0xDA:
            raise DataError(f"the JPEG header is damaged; {COPY_AGAIN_HINT}")
        # SOF0 to SOF15 except DHT (C4), JPG (C8) and DAC (CC); JPEG-LS
        if (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xF7:
            break
        if marker == 0xEE and data[offset + 4 : offset + 9] == b"Adobe":
            adobe_transform = data[offset + 15]
        offset += 2 + length
    samples_per_pixel = data[offset + 9]
    component_ids = bytes(data[offset + 10 + 3 * i] for i in range(samples_per_pixel))
    is_lossy = marker in (0xC0, 0xC1, 0xC2)
    is_ycbcr = is_lossy and adobe_transform != 0 and component_ids.upper() != b"RGB"
    return CodestreamHeader(
        _read_uint(data, offset + 5, 2),
        _read_uint(data, offset + 7, 2),
        samples_per_pixel,
        data[offset + 4],
        is_ycbcr=is_ycbcr,
    )


def _parse_j2k_header(data: bytes) -> CodestreamHeader:
    offset = data[:4096].find(b"\xff\x4f\xff\x51")
    if offset < 0:
        raise DataError(f"the compressed pixels are neither JPEG nor JPEG 2000; {COPY_AGAIN_HINT}")
    x1, y1, x0, y0 = (_read_uint(data, offset + 8 + 4 * i, 4) for i in range(4))
    samples_per_pixel = _read_uint(data, offset + 40, 2)
    bits_per_sample = [(data[offset + 42 + 3 * i] & 0x7F) + 1 for i in range(samples_per_pixel)]
    if len(set(bits_per_sample)) != 1 or any(
        data[offset + 43 + 3 * i : offset + 45 + 3 * i] != b"\1\1" for i in range(samples_per_pixel)
    ):
        raise DataError("JPEG 2000 with samples of different size; export it again as RGB")
    cod_offset = data.find(b"\xff\x52", offset, offset + 4096)
    return CodestreamHeader(
        y1 - y0,
        x1 - x0,
        samples_per_pixel,
        bits_per_sample[0],
        has_color_transform=samples_per_pixel == 3 and cod_offset > 0 and data[cod_offset + 8] == 1,
    )


def _read_uint(data: bytes, offset: int, size: int) -> int:
    if offset + size > len(data):
        raise IndexError
    return int.from_bytes(data[offset : offset + size], "big")


def decode_jpeg(data: bytes, photometric_interpretation: str) -> np.ndarray:
    """(H, W) or (H, W, 3) RGB. The JPEG's markers define the color space; without any, `photometric_interpretation`."""
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
            raise DataError(f"a JPEG of {image.mode}; export it again as RGB")
        if image.mode == "L":
            return np.asarray(image)
        component_ids = bytes(layer[0] for layer in image.layer)
        adobe_transform = image.info.get("adobe_transform")
        if photometric_interpretation == "RGB" and "jfif" not in image.info and adobe_transform is None:
            if component_ids.upper() != b"RGB":
                image.draft("YCbCr", image.size)  # Pillow assumes YCbCr; this makes it return the stored values
            return np.asarray(image)
        if photometric_interpretation != "RGB" and adobe_transform == 0 and component_ids.upper() != b"RGB":
            return convert_color_space(np.asarray(image), "YBR_FULL", "RGB")
        return np.asarray(image)
