from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.core.errors import DataError
from sites.data import images
from sites.data.images import decode_image, decode_images, format_problems


def save_image(image: Image.Image, file: Path, **options: object) -> Path:
    image.save(file, **options)
    return file


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "tiff"])
def test_decode_image_keeps_rgb(tmp_path: Path, suffix: str) -> None:
    array = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    decoded = decode_image(save_image(Image.fromarray(array), tmp_path / f"a.{suffix}"), 3)
    assert decoded.dtype == np.uint8
    assert decoded.tolist() == array.transpose(2, 0, 1).tolist()


def test_decode_image_grey_from_colour_and_back(tmp_path: Path) -> None:
    red = save_image(Image.new("RGB", (2, 2), (255, 0, 0)), tmp_path / "red.png")
    assert decode_image(red, 1).tolist() == [[[76, 76], [76, 76]]]
    grey = save_image(Image.new("L", (2, 2), 9), tmp_path / "grey.jpg")
    assert decode_image(grey, 3).tolist() == [[[9, 9], [9, 9]]] * 3


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_decode_image_scales_16_bit_grey_by_the_full_range(tmp_path: Path, suffix: str, channels: int) -> None:
    image_16_bit = Image.fromarray(np.array([[0, 256, 32768, 65535]], np.uint16))
    assert (
        decode_image(save_image(image_16_bit, tmp_path / f"a.{suffix}"), channels).tolist()
        == [[[0, 1, 128, 255]]] * channels
    )


def test_decode_image_scales_16_bit_colour_by_the_full_range(tmp_path: Path) -> None:
    row = b"\0" + struct.pack(">3H", 256, 32768, 65535)  # one RGB pixel
    head = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    chunks = png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(row)) + png_chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    assert decode_image(tmp_path / "a.png", 3).flatten().tolist() == [1, 128, 255]


def test_decode_image_palette_alpha_cmyk_and_bits(tmp_path: Path) -> None:
    blue = Image.new("RGB", (1, 1), (0, 0, 255))
    assert decode_image(save_image(blue.quantize(4), tmp_path / "p.png"), 3).flatten().tolist() == [0, 0, 255]
    clear = save_image(blue.quantize(4), tmp_path / "t.png", transparency=b"\0")
    assert decode_image(clear, 3).flatten().tolist() == [255, 255, 255]
    half = save_image(Image.new("RGBA", (1, 1), (0, 0, 0, 51)), tmp_path / "a.png")
    assert decode_image(half, 3).flatten().tolist() == [204] * 3
    assert decode_image(save_image(Image.new("CMYK", (1, 1)), tmp_path / "c.tif"), 3).flatten().tolist() == [255] * 3
    assert decode_image(save_image(Image.new("1", (1, 1), 1), tmp_path / "1.png"), 1).flatten().tolist() == [255]


def test_decode_image_format_is_recognized_by_content(tmp_path: Path) -> None:
    Image.new("L", (1, 1), 5).save(tmp_path / "a", "PNG")
    (tmp_path / "a").rename(tmp_path / "a.jpg")
    assert decode_image(tmp_path / "a.jpg", 1).tolist() == [[[5]]]


def test_decode_image_applies_exif_rotation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees
    file = save_image(Image.new("L", (2, 3)), tmp_path / "a.png", exif=exif)
    assert decode_image(file, 1).shape == (1, 2, 3)


def test_decode_image_size(tmp_path: Path) -> None:
    file = save_image(Image.new("RGB", (5, 9), "white"), tmp_path / "a.png")
    assert decode_image(file, 3).shape == (3, 9, 5)
    assert decode_image(file, 3, 4).shape == (3, 4, 4)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_decode_images_truncated_files_are_refused(tmp_path: Path, suffix: str, fraction: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    file = save_image(Image.fromarray(noise), tmp_path / f"a.{suffix}")
    raw = file.read_bytes()
    file.write_bytes(raw[: int(fraction * len(raw))])
    [reason] = decode_images([file], 3)
    assert isinstance(reason, str)


def test_decode_images_returns_each_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "script.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n")
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("L", (2, 2)).save(tmp_path / "pages.tif", save_all=True, append_images=[Image.new("L", (2, 2))])
    Image.new("F", (2, 2)).save(tmp_path / "float.tif")
    Image.new("L", (9, 9)).save(tmp_path / "large.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 80)
    expected = {
        "empty.png": "empty file",
        "text.png": "no PNG, JPEG, TIFF or BMP image",
        "script.png": "no PNG, JPEG, TIFF or BMP image",
        "pipe.png": "not a regular file",
        "absent.png": "no such file",
        "pages.tif": "2 pages",
        "float.tif": "32-bit pixels",
        "large.png": "million pixels",
    }
    reasons = decode_images([tmp_path / name for name in expected], 3)
    for reason, start in zip(reasons, expected.values(), strict=True):
        assert isinstance(reason, str)
        assert start in reason


@pytest.mark.parametrize("side", [10_000, 30_000])
def test_decode_images_decompression_bomb_is_refused(tmp_path: Path, side: int) -> None:
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    body = png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(bytes(100))) + png_chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    [reason] = decode_images([tmp_path / "a.png"], 1)
    assert "million pixels" in str(reason)


def test_decode_images_returns_the_order_of_files(tmp_path: Path) -> None:
    files = [save_image(Image.new("L", (1, 1), i), tmp_path / f"{i}.png") for i in range(30)]
    files[7].write_bytes(b"")
    decoded = decode_images(files, 1)
    assert decoded[7] == "empty file"
    assert [int(a.item()) for a in decoded if not isinstance(a, str)] == [i for i in range(30) if i != 7]


def test_decode_image_error_is_the_reason_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^no such file$"):
        decode_image(tmp_path / "a.png", 3)


def test_format_problems_shows_ten() -> None:
    assert format_problems(["a", "b"]) == "\n  a\n  b"
    assert format_problems([str(i) for i in range(13)]).endswith("\n  9\n  and 3 more")
