from __future__ import annotations

import io
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydicom import uid

from deploy.imaging.images import expand_paths, read_image_bytes, read_image_file
from deploy.imaging.input_image import InputImage
from pipeline.core.errors import DataError
from tests.support.dicom_files import (
    compress_dicom,
    encode_dicom,
    encode_jpeg,
    make_dicom,
    make_gradient,
    make_noise,
    set_compressed_frames,
)


def encode_pil_image(image: Image.Image, kind: str, **how: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def read_one(data: bytes) -> np.ndarray:
    [image] = read_image_bytes(data, "-")
    assert (image.name, image.dicom_path, image.frame_number) == ("-", None, 1)
    assert image.pixels.dtype == np.uint8
    assert image.pixels.ndim == 3
    assert image.pixels.flags["C_CONTIGUOUS"]
    return image.pixels


def assert_refused(data: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_image_bytes(data, "x")
    assert str(caught.value).startswith("x: ")
    assert ";" in str(caught.value)  # there is a cure


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_color_and_gray_images(kind: str) -> None:
    truth = make_noise(5, 7, 3)
    assert (read_one(encode_pil_image(Image.fromarray(truth), kind)) == truth).all()
    assert (read_one(encode_pil_image(Image.fromarray(truth[..., 0]), kind)) == truth[..., :1]).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_by_its_full_range(kind: str) -> None:
    deep = make_noise(5, 7, bits=16)
    assert (read_one(encode_pil_image(Image.fromarray(deep), kind)) == (deep >> 8)[..., None]).all()


def test_jpeg_and_exif_rotation() -> None:
    truth = make_gradient()
    assert np.abs(read_one(encode_jpeg(truth)).astype(int) - truth).mean() < 2
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = read_one(encode_pil_image(Image.fromarray(truth), "PNG", exif=exif))
    assert (rotated == np.rot90(truth, -1)).all()


def test_transparent_is_white() -> None:
    assert read_one(encode_pil_image(Image.new("RGBA", (1, 1), (0, 0, 0, 0)), "PNG")).tolist() == [[[255, 255, 255]]]


def test_cmyk_jpeg_of_adobe_and_of_others() -> None:
    # cyan ink alone; Pillow writes Adobe's inverted values, with Adobe's marker
    ink = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    adobe = encode_pil_image(ink, "JPEG", quality=100)
    start = adobe.index(b"\xff\xee")
    assert adobe[start + 4 : start + 9] == b"Adobe"
    assert np.abs(read_one(adobe).astype(int) - [0, 255, 255]).max() <= 2
    # without the marker the same samples are not inverted: 0, 255, 255, 255 is full magenta, yellow and black
    plain = adobe[:start] + adobe[start + 16 :]
    assert np.abs(read_one(plain).astype(int)).max() <= 2


def test_content_decides_on_the_format(tmp_path: Path) -> None:
    truth = make_noise(4, 4, 3)
    (tmp_path / "a.dcm").write_bytes(encode_pil_image(Image.fromarray(truth), "PNG"))
    (tmp_path / "b.png").write_bytes(encode_dicom(make_dicom(truth[None])))
    [a], [b] = read_image_file(tmp_path / "a.dcm"), read_image_file(tmp_path / "b.png")
    assert (a.pixels == truth).all()
    assert (b.pixels == truth).all()
    assert a.dicom_path is None
    assert b == InputImage(str(tmp_path / "b.png"), b.pixels, tmp_path / "b.png", 1, b.identity)
    assert b.identity is not None


def test_unsupported_formats_are_refused() -> None:
    truth = Image.fromarray(make_noise(40, 40, 3))
    assert_refused(b"", "empty")
    assert_refused(b"a text renamed to .dcm" * 20, "no PNG, JPEG, TIFF or BMP")
    assert_refused(encode_pil_image(truth, "JPEG")[:-300], "damaged")
    assert_refused(encode_pil_image(truth, "PNG")[:-300], "damaged")
    assert_refused(encode_pil_image(truth, "TIFF", save_all=True, append_images=[truth]), "2 pages; save each")
    assert_refused(encode_pil_image(truth, "GIF", save_all=True, append_images=[truth.rotate(90)]), "animation")
    assert_refused(encode_pil_image(truth, "WEBP"), "WebP; save it as PNG")
    assert_refused(encode_pil_image(truth, "JPEG2000"), "JPEG 2000")
    assert_refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "never run")
    assert_refused(b"PK\x03\x04" + bytes(200), "unpack it")
    assert_refused(encode_pil_image(Image.new("F", (2, 2)), "TIFF"), "32-bit")
    assert_refused(bytes(128) + b"DICM", "damaged or truncated")


def test_unreadable_paths_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for name, match in (
        ("absent.png", "no such file"),
        ("x" * 300, "cannot be read"),
        ("pipe.png", "not a file"),
        (".", "not a file"),
    ):
        with pytest.raises(DataError, match=match):
            read_image_file(tmp_path / name)


def make_png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_decompression_bomb_is_refused_by_its_header() -> None:
    head = make_png_chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    body = make_png_chunk(b"IDAT", zlib.compress(bytes(10**6), 9)) + make_png_chunk(b"IEND", b"")
    tracemalloc.start()
    start = time.perf_counter()
    assert_refused(b"\x89PNG\r\n\x1a\n" + head + body, "80 million pixels; cut it into tiles")
    assert time.perf_counter() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()


def test_folders_are_searched(tmp_path: Path) -> None:
    dicom = encode_dicom(make_dicom(make_noise(1, 4, 4, 3)))
    for name in ("b.PNG", "a.jpeg", "sub/c.tif", "sub/d.dcm", "e.txt", ".hidden.png", ".cache/f.png", "g.json", "h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "sub" / "IM0001").write_bytes(dicom)
    (tmp_path / "sub" / "1.2.840.77").write_bytes(dicom)
    got = [str(p.relative_to(tmp_path)) for p in expand_paths([tmp_path])]
    assert got == ["a.jpeg", "b.PNG", "sub/1.2.840.77", "sub/IM0001", "sub/c.tif", "sub/d.dcm"]
    given = [tmp_path / "e.txt", tmp_path / "absent"]
    assert list(expand_paths(given)) == given  # reading them gives the reason


def test_import_of_images_is_light() -> None:
    code = "import sys, deploy.imaging.images; print([m for m in ('torch', 'cv2', 'pydicom', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def make_seeds() -> list[bytes]:
    small = make_gradient(8, 8)
    grey = small[None, ..., 0]
    return [
        encode_pil_image(Image.fromarray(small), "PNG"),
        encode_jpeg(small),
        encode_pil_image(Image.fromarray(small), "BMP"),
        encode_pil_image(Image.fromarray(small), "TIFF"),
        encode_dicom(make_dicom(small[None])),
        encode_dicom(make_dicom(grey, "MONOCHROME1", WindowCenter="9", WindowWidth="99"), uid.ImplicitVRLittleEndian),
        encode_dicom(make_dicom(small[None]), uid.DeflatedExplicitVRLittleEndian),
        encode_dicom(
            set_compressed_frames(make_dicom(small[None], "YBR_FULL_422"), [encode_jpeg(small)]), uid.JPEGBaseline8Bit
        ),
        compress_dicom(make_dicom(small[None]), uid.RLELossless),
        compress_dicom(make_dicom(grey, "MONOCHROME2"), uid.JPEGLSLossless),
        compress_dicom(make_dicom(make_gradient(64, 64)[None], "YBR_RCT"), uid.JPEG2000Lossless),
    ]


SEEDS = make_seeds()
EDIT = st.tuples(st.sampled_from(["flip", "cut", "insert", "set"]), st.floats(0, 1), st.integers(0, 255))


def apply_edits(data: bytes, edits: list[tuple[str, float, int]]) -> bytes:
    out = bytearray(data)
    for how, where, value in edits:
        at = int(where * max(len(out) - 1, 0))
        if how == "flip" and out:
            out[at] ^= value or 1
        elif how == "cut":
            del out[at : at + 1 + value]
        elif how == "insert":
            out[at:at] = random.Random(value).randbytes(1 + value % 16)
        elif out:
            out[at] = value
    return bytes(out)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SEEDS), st.lists(EDIT, min_size=1, max_size=4))
def test_damaged_files_give_images_or_data_error(seed: bytes, edits: list[tuple[str, float, int]]) -> None:
    try:
        for image in read_image_bytes(apply_edits(seed, edits), "x"):
            assert image.pixels.dtype == np.uint8
            assert image.pixels.shape[2:] == (3,)
    except DataError as error:
        assert str(error).startswith("x: ")  # noqa: PT017


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=300), st.sampled_from([b"", bytes(128) + b"DICM", b"\x08\0\x05\0CS", b"\xff\xd8\xff", b"II*\0"])
)
def test_any_bytes_give_images_or_data_error(rest: bytes, start: bytes) -> None:
    try:
        read_image_bytes(start + rest, "x")
    except DataError as error:
        assert str(error).startswith("x: ")  # noqa: PT017
