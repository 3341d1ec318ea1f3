"""What a compressed frame says of itself, read without unpacking it; and 8-bit JPEG, whose colours need care."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from pydicom.pixels.processing import convert_color_space

from pipeline.core.errors import BadData

BEGINNINGS = (b"\xff\xd8\xff", b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP")  # JPEG and JPEG-LS; JPEG 2000; that in a box
AGAIN = "copy or export it again"


@dataclass(frozen=True)
class Stream:
    rows: int
    columns: int
    samples: int
    bits: int
    mixed: bool = False  # JPEG 2000: unpacking undoes a colour transform, so RGB comes out
    luma: bool = False  # JPEG: lossy, and its markers do not say RGB


def stream(data: bytes) -> Stream:
    # After the end marker only padding is allowed; without one the frame was cut.
    if b"\xff\xd9" not in data[-16:]:
        raise BadData(f"a compressed frame is cut short; {AGAIN}")
    try:
        if data.startswith(b"\xff\xd8"):
            return _jpeg_stream(data)
        return _j2k_stream(data)
    except IndexError:
        raise BadData(f"the compressed pixels end inside their header; {AGAIN}") from None


def _jpeg_stream(data: bytes) -> Stream:
    at, adobe = 2, -1
    while True:
        while data[at] == 0xFF and data[at + 1] == 0xFF:  # fill bytes
            at += 1
        marker, length = data[at + 1], _word(data, at + 2, 2)
        if data[at] != 0xFF or length < 2 or marker == 0xDA:
            raise BadData(f"the JPEG header is damaged; {AGAIN}")
        # SOF0 to SOF15 but DHT (C4), JPG (C8) and DAC (CC), and JPEG-LS
        if (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xF7:
            break
        if marker == 0xEE and data[at + 4 : at + 9] == b"Adobe":
            adobe = data[at + 15]
        at += 2 + length
    samples = data[at + 9]
    names = bytes(data[at + 10 + 3 * i] for i in range(samples))
    lossy = marker in (0xC0, 0xC1, 0xC2)
    luma = lossy and adobe != 0 and names.upper() != b"RGB"
    return Stream(_word(data, at + 5, 2), _word(data, at + 7, 2), samples, data[at + 4], luma=luma)


def _j2k_stream(data: bytes) -> Stream:
    at = data[:4096].find(b"\xff\x4f\xff\x51")
    if at < 0:
        raise BadData(f"the compressed pixels are neither JPEG nor JPEG 2000; {AGAIN}")
    x1, y1, x0, y0 = (_word(data, at + 8 + 4 * i, 4) for i in range(4))
    samples = _word(data, at + 40, 2)
    bits = [(data[at + 42 + 3 * i] & 0x7F) + 1 for i in range(samples)]
    if len(set(bits)) != 1 or any(data[at + 43 + 3 * i : at + 45 + 3 * i] != b"\1\1" for i in range(samples)):
        raise BadData("JPEG 2000 with unlike samples; export it again as RGB")
    coding = data.find(b"\xff\x52", at, at + 4096)
    return Stream(y1 - y0, x1 - x0, samples, bits[0], mixed=samples == 3 and coding > 0 and data[coding + 8] == 1)


def _word(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + size], "big")


def jpeg(data: bytes, colour: str) -> np.ndarray:
    """(H, W) or (H, W, 3) RGB. Markers of the JPEG decide; where it has none, the photometric interpretation does."""
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
            raise BadData(f"a JPEG of {image.mode}; export it again as RGB")
        if image.mode == "L":
            return np.asarray(image)
        names = bytes(layer[0] for layer in image.layer)
        adobe = image.info.get("adobe_transform")
        if colour == "RGB" and "jfif" not in image.info and adobe is None:
            if names.upper() != b"RGB":
                image.draft(
                    "YCbCr", image.size
                )  # Pillow would take it for YCbCr; so asked, it hands out what is stored
            return np.asarray(image)
        if colour != "RGB" and adobe == 0 and names.upper() != b"RGB":
            return convert_color_space(np.asarray(image), "YBR_FULL", "RGB")
        return np.asarray(image)
