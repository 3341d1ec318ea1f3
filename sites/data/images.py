"""Decodes image files to uint8 arrays. The format is recognised by the content, not by the suffix.

16-bit grey is scaled by the full range of 16 bits (65535 -> 255), which is also how Pillow reads 16-bit colour;
it is never stretched to an image's own range, so equal grey values stay equal across images and sites.
Transparent pixels become white, EXIF rotation is applied.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageChops, ImageOps, UnidentifiedImageError

from pipeline.core.errors import DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp"})
# No other formats: Pillow would start Ghostscript for a PostScript file named cell.png.
IMAGE_FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
MAX_PIXELS = 80_000_000  # a few kB can unpack to gigabytes
MAX_LISTED = 10


def decode_image(file: Path, channels: int, size: int | None = None) -> np.ndarray:
    """(channels, H, W) uint8; `size` resizes to a square. Raises `DataError` with the reason alone, without the file name."""
    if not file.is_file():  # reading a named pipe would block forever
        raise DataError("not a regular file" if file.exists() else "no such file")
    if not file.stat().st_size:
        raise DataError("empty file")
    return decode_image_stream(file, channels, size)


def decode_image_stream(source: Path | BinaryIO, channels: int, size: int | None = None) -> np.ndarray:
    """Like `decode_image`, for an existing file or a byte stream."""
    try:
        with Image.open(source, formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # MPO: a camera's JPEG with previews appended
                raise DataError(f"{frames} pages; save each as a file of its own")
            upright = ImageOps.exif_transpose(image)
            if image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info:
                upright = ImageChops.invert(upright)  # Pillow treats every CMYK JPEG as Adobe's inverted variant
            pixels = _to_eight_bits(upright, image.format == "PNG").convert("L" if channels == 1 else "RGB")
        if size is not None and pixels.size != (size, size):
            pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
    except (DataError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise DataError(f"no {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]} image, or a damaged one") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"more than {MAX_PIXELS // 10**6} million pixels; cut it into tiles") from None
    except Exception as error:  # a damaged file can raise anything inside Pillow
        raise DataError(f"damaged ({error or type(error).__name__})") from error
    array = np.asarray(pixels)
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _to_eight_bits(image: Image.Image, is_png: bool) -> Image.Image:
    # older Pillows open a 16-bit PNG as "I"
    if image.mode.startswith("I;16") or (image.mode == "I" and is_png):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError("32-bit pixels; save it with 8 or 16 bits")
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image


def decode_images(files: Sequence[Path], channels: int, size: int | None = None) -> list[np.ndarray | str]:
    """In the order of `files`: an array, or the reason why the file cannot be decoded."""

    def decode_or_reason(file: Path) -> np.ndarray | str:
        try:
            return decode_image(file, channels, size)
        except DataError as error:
            return str(error)

    # Warning filters are global to the process, so they are set outside the threads.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return list(pool.map(decode_or_reason, files))


def format_problems(problems: Sequence[str]) -> str:
    """One problem per line; after the first ten only the number of the others."""
    num_omitted = len(problems) - MAX_LISTED
    return "".join(f"\n  {p}" for p in problems[:MAX_LISTED]) + (
        f"\n  and {num_omitted} more" if num_omitted > 0 else ""
    )
