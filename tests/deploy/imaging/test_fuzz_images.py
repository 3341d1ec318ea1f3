"""Fuzzing with damaged images for five minutes. A worker process reads them, so that crashes of decoders are found too.

HEMOFED_FUZZ_SECONDS and HEMOFED_FUZZ_SEED shorten a run or repeat one.
"""

from __future__ import annotations

import base64
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydicom import uid

from deploy.imaging.images import read_image_bytes
from pipeline.core.errors import DataError
from tests.support.dicom_files import (
    compress_dicom,
    encode_dicom,
    encode_jpeg,
    load_pydicom_file,
    make_dicom,
    make_gradient,
    make_noise,
    set_compressed_frames,
)

MAX_SECONDS = 20.0  # for one small image
MEMORY = 6 * 2**30
SHIPPED = (
    "MR_small_RLE.dcm",
    "MR_small_jp2klossless.dcm",
    "MR_small_jpeg_ls_lossless.dcm",
    "MR_small_implicit.dcm",
    "MR_small_bigendian.dcm",
    "SC_rgb_jpeg_gdcm.dcm",
    "SC_rgb_rle_2frame.dcm",
    "SC_rgb_rle_16bit.dcm",
    "SC_rgb_gdcm_KY.dcm",
    "SC_rgb_dcmtk_+eb+cr.dcm",
    "SC_rgb_jls_lossy_line.dcm",
    "JPGExtended.dcm",
    "JPEG2000.dcm",
    "image_dfl.dcm",
    "SC_rgb_small_odd_jpeg.dcm",
    "693_J2KI.dcm",
    "no_meta.dcm",
    "test-SR.dcm",
)


def make_seeds(folder: Path) -> list[bytes]:
    small = Image.fromarray(make_gradient(16, 16))
    ways: list[tuple[str, dict[str, object]]] = [
        ("a.png", {}),
        ("b.jpg", {}),
        ("c.bmp", {}),
        ("d.tif", {}),
        ("e.tif", {"compression": "tiff_lzw"}),
        ("f.tif", {"compression": "jpeg"}),
        ("g.tif", {"compression": "tiff_adobe_deflate"}),
        ("h.jpg", {"progressive": True}),
    ]
    for name, how in ways:
        small.save(folder / name, **how)
    small.convert("CMYK").save(folder / "i.jpg")
    small.quantize(9).save(folder / "j.png", transparency=1)
    grey, rgb = make_noise(1, 8, 8, bits=12), make_gradient(8, 8)[None]
    return [
        *(name.read_bytes() for name in sorted(folder.iterdir())),
        *(load_pydicom_file(name) for name in SHIPPED),
        encode_dicom(
            make_dicom(
                grey,
                "MONOCHROME1",
                BitsStored=12,
                WindowCenter="900",
                WindowWidth="99",
                RescaleSlope="2",
                RescaleIntercept="1",
            )
        ),
        encode_dicom(make_dicom(np.concatenate([rgb, rgb])), uid.DeflatedExplicitVRLittleEndian),
        encode_dicom(
            set_compressed_frames(make_dicom(np.concatenate([rgb, rgb]), "YBR_FULL_422"), [encode_jpeg(rgb[0])] * 2),
            uid.JPEGBaseline8Bit,
        ),
        compress_dicom(make_dicom(rgb), uid.RLELossless),
    ]


ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0",
    b"\xfe\xff\xdd\xe0\0\0\0\0",
    b"\x7f\xff",
    b"\x80\0",
    b"SQ\0\0",
    b"\xff\xd9",
)


def damage(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8, 30))):
        at = rng.randrange(len(out)) if rng.random() < 0.5 else rng.randrange(min(len(out), 900))  # headers are small
        match rng.randrange(7):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + rng.choice((1, 2, 7, 100))]
            case 3:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 4:
                odd = rng.choice(ODD_BYTES)
                out[at : at + len(odd)] = odd
            case 5:
                del out[at if rng.random() < 0.2 else max(at, len(out) - 50) :]
            case _:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                out[at : at + rng.choice((0, 32))] = other[start : start + rng.choice((4, 32, 400))]
        if not out:
            break
    return bytes(out)


def fuzz_for(seed: int, seconds: float, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    (folder / "seeds").mkdir()
    good, rng, count, read = make_seeds(folder / "seeds"), random.Random(seed), 0, 0
    case, log = folder / "case", folder / "log"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = damage(rng.choice(good), rng, good)
        case.write_bytes(data)  # remains if a decoder crashes the process
        start = time.monotonic()
        try:
            images = read_image_bytes(data, "x")
            assert all(p.pixels.dtype == np.uint8 and p.pixels.shape[2:] == (3,) for p in images)
            read += 1
        except DataError as error:
            assert str(error).startswith("x: ")  # noqa: PT017
            assert ";" in str(error)  # noqa: PT017
        assert time.monotonic() - start < MAX_SECONDS, "too slow"
        count += 1
    log.write_text(f"{count} files, {read} still read")


@pytest.mark.slow
def test_fuzz_damaged_images(tmp_path: Path) -> None:
    seed = int(os.environ.get("HEMOFED_FUZZ_SEED", time.time_ns() % 2**32))
    seconds = float(os.environ.get("HEMOFED_FUZZ_SECONDS", "300"))
    code = f"from tests.deploy.imaging.test_fuzz_images import *; fuzz_for({seed}, {seconds}, Path({str(tmp_path)!r}))"
    command = [sys.executable, "-W", "error", "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=seconds + 120)
    case = base64.b64encode((tmp_path / "case").read_bytes()).decode()[:20_000]
    assert done.returncode == 0, f"seed {seed}, exit {done.returncode}\n{done.stderr[-3000:]}\n{case}"
    sys.stdout.write(f"seed {seed}: {(tmp_path / 'log').read_text()}\n")
