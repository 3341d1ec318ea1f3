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

from deploy.imaging.images import InputImage, expand_paths, read_image_bytes, read_image_file
from pipeline.core.errors import DataError
from tests.support.dicom_files import file, image, jpeg, noise, packed, smooth, wrap


def saved(picture: Image.Image, kind: str, **how: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **how)
    return out.getvalue()


def one(data: bytes) -> np.ndarray:
    [picture] = read_image_bytes(data, "-")
    assert (picture.name, picture.dicom_path, picture.frame_number) == ("-", None, 1)
    assert picture.pixels.dtype == np.uint8
    assert picture.pixels.ndim == 3
    assert picture.pixels.flags["C_CONTIGUOUS"]
    return picture.pixels


def refused(data: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_image_bytes(data, "x")
    assert str(caught.value).startswith("x: ")
    assert ";" in str(caught.value)  # there is a cure


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_colours_and_greys(kind: str) -> None:
    truth = noise(5, 7, 3)
    assert (one(saved(Image.fromarray(truth), kind)) == truth).all()
    assert (one(saved(Image.fromarray(truth[..., 0]), kind)) == truth[..., :1]).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_by_the_full_range(kind: str) -> None:
    deep = noise(5, 7, bits=16)
    assert (one(saved(Image.fromarray(deep), kind)) == (deep >> 8)[..., None]).all()


def test_jpeg_and_its_rotation() -> None:
    truth = smooth()
    assert np.abs(one(jpeg(truth)).astype(int) - truth).mean() < 2
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = one(saved(Image.fromarray(truth), "PNG", exif=exif))
    assert (turned == np.rot90(truth, -1)).all()


def test_transparent_is_white() -> None:
    assert one(saved(Image.new("RGBA", (1, 1), (0, 0, 0, 0)), "PNG")).tolist() == [[[255, 255, 255]]]


def test_cmyk_jpeg_of_adobe_and_of_others() -> None:
    # cyan ink alone; Pillow writes Adobe's inverted values, with Adobe's marker
    ink = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    adobe = saved(ink, "JPEG", quality=100)
    start = adobe.index(b"\xff\xee")
    assert adobe[start + 4 : start + 9] == b"Adobe"
    assert np.abs(one(adobe).astype(int) - [0, 255, 255]).max() <= 2
    # without the marker the same samples are not inverted: 0, 255, 255, 255 is full magenta, yellow and black
    plain = adobe[:start] + adobe[start + 16 :]
    assert np.abs(one(plain).astype(int)).max() <= 2


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    truth = noise(4, 4, 3)
    (tmp_path / "a.dcm").write_bytes(saved(Image.fromarray(truth), "PNG"))
    (tmp_path / "b.png").write_bytes(file(image(truth[None])))
    [a], [b] = read_image_file(tmp_path / "a.dcm"), read_image_file(tmp_path / "b.png")
    assert (a.pixels == truth).all()
    assert (b.pixels == truth).all()
    assert a.dicom_path is None
    assert b == InputImage(str(tmp_path / "b.png"), b.pixels, tmp_path / "b.png", 1)


def test_each_refusal() -> None:
    truth = Image.fromarray(noise(40, 40, 3))
    refused(b"", "empty")
    refused(b"a text renamed to .dcm" * 20, "no PNG, JPEG, TIFF or BMP")
    refused(saved(truth, "JPEG")[:-300], "damaged")
    refused(saved(truth, "PNG")[:-300], "damaged")
    refused(saved(truth, "TIFF", save_all=True, append_images=[truth]), "2 pages; save each")
    refused(saved(truth, "GIF", save_all=True, append_images=[truth.rotate(90)]), "animation")
    refused(saved(truth, "WEBP"), "WebP; save it as PNG")
    refused(saved(truth, "JPEG2000"), "JPEG 2000")
    refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "never run")
    refused(b"PK\x03\x04" + bytes(200), "unpack it")
    refused(saved(Image.new("F", (2, 2)), "TIFF"), "32-bit")
    refused(bytes(128) + b"DICM", "damaged or cut")


def test_each_refusal_of_a_path(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for name, match in (
        ("absent.png", "no such file"),
        ("x" * 300, "cannot be read"),
        ("pipe.png", "not a file"),
        (".", "not a file"),
    ):
        with pytest.raises(DataError, match=match):
            read_image_file(tmp_path / name)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_bomb_is_refused_by_its_header() -> None:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(10**6), 9)) + chunk(b"IEND", b"")
    tracemalloc.start()
    start = time.perf_counter()
    refused(b"\x89PNG\r\n\x1a\n" + head + body, "80 million pixels; cut it into tiles")
    assert time.perf_counter() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()


def test_folders_are_searched(tmp_path: Path) -> None:
    dicom = file(image(noise(1, 4, 4, 3)))
    for name in ("b.PNG", "a.jpeg", "sub/c.tif", "sub/d.dcm", "e.txt", ".hidden.png", ".cache/f.png", "g.json", "h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "sub" / "IM0001").write_bytes(dicom)
    (tmp_path / "sub" / "1.2.840.77").write_bytes(dicom)
    got = [str(p.relative_to(tmp_path)) for p in expand_paths([tmp_path])]
    assert got == ["a.jpeg", "b.PNG", "sub/1.2.840.77", "sub/IM0001", "sub/c.tif", "sub/d.dcm"]
    given = [tmp_path / "e.txt", tmp_path / "absent"]
    assert list(expand_paths(given)) == given  # the reader says what is wrong with them


def test_light_to_import() -> None:
    code = "import sys, deploy.imaging.images; print([m for m in ('torch', 'cv2', 'pydicom', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def seeds() -> list[bytes]:
    small = smooth(8, 8)
    grey = small[None, ..., 0]
    return [
        saved(Image.fromarray(small), "PNG"),
        jpeg(small),
        saved(Image.fromarray(small), "BMP"),
        saved(Image.fromarray(small), "TIFF"),
        file(image(small[None])),
        file(image(grey, "MONOCHROME1", WindowCenter="9", WindowWidth="99"), uid.ImplicitVRLittleEndian),
        file(image(small[None]), uid.DeflatedExplicitVRLittleEndian),
        file(wrap(image(small[None], "YBR_FULL_422"), [jpeg(small)]), uid.JPEGBaseline8Bit),
        packed(image(small[None]), uid.RLELossless),
        packed(image(grey, "MONOCHROME2"), uid.JPEGLSLossless),
        packed(image(smooth(64, 64)[None], "YBR_RCT"), uid.JPEG2000Lossless),
    ]


SEEDS = seeds()
EDIT = st.tuples(st.sampled_from(["flip", "cut", "insert", "set"]), st.floats(0, 1), st.integers(0, 255))


def edited(data: bytes, edits: list[tuple[str, float, int]]) -> bytes:
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
def test_damage_gives_pictures_or_bad_data(seed: bytes, edits: list[tuple[str, float, int]]) -> None:
    try:
        for picture in read_image_bytes(edited(seed, edits), "x"):
            assert picture.pixels.dtype == np.uint8
            assert picture.pixels.shape[2:] == (3,)
    except DataError as error:
        assert str(error).startswith("x: ")  # noqa: PT017


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=300), st.sampled_from([b"", bytes(128) + b"DICM", b"\x08\0\x05\0CS", b"\xff\xd8\xff", b"II*\0"])
)
def test_any_bytes_give_pictures_or_bad_data(rest: bytes, start: bytes) -> None:
    try:
        read_image_bytes(start + rest, "x")
    except DataError as error:
        assert str(error).startswith("x: ")  # noqa: PT017
