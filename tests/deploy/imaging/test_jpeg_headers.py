"""Compressed DICOM of every transfer syntax and of several writers."""

from __future__ import annotations

import numpy as np
import pytest
from pydicom import uid
from pydicom.pixels.processing import convert_color_space

from tests.support.dicom_files import (
    assert_close,
    compress_dicom,
    encode_dicom,
    encode_jpeg,
    load_pydicom_file,
    make_dicom,
    make_gradient,
    make_noise,
    read_pixels,
    set_compressed_frames,
)

LOSSLESS = [uid.RLELossless, uid.JPEG2000Lossless, uid.JPEGLSLossless]


@pytest.mark.parametrize("syntax", LOSSLESS, ids=lambda s: s.name)
@pytest.mark.parametrize("count", [1, 3])
def test_lossless_rgb(syntax: uid.UID, count: int) -> None:
    truth = make_noise(count, 65, 67, 3)
    colour = "YBR_RCT" if syntax == uid.JPEG2000Lossless else "RGB"
    assert (read_pixels(compress_dicom(make_dicom(truth, colour), syntax)) == truth).all()


@pytest.mark.parametrize("syntax", LOSSLESS, ids=lambda s: s.name)
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_lossless_gray(syntax: uid.UID, bits: int) -> None:
    truth = make_noise(1, 65, 67, bits=bits)
    got = read_pixels(compress_dicom(make_dicom(truth, "MONOCHROME2", BitsStored=bits), syntax))
    assert (got == (truth >> (bits - 8))[..., None]).all()


def test_lossless_jpeg() -> None:
    # pydicom's wheel has one image in several compressions
    assert (
        read_pixels(load_pydicom_file("SC_rgb_jpeg_gdcm.dcm")) == read_pixels(load_pydicom_file("SC_rgb_rle.dcm"))
    ).all()


@pytest.mark.parametrize("colour", ["RGB", "YBR_ICT"])
def test_lossy_jpeg_2000(colour: str) -> None:
    truth = make_gradient(64, 64)[None]
    assert_close(read_pixels(compress_dicom(make_dicom(truth, colour), uid.JPEG2000, j2k_psnr=[60])), truth, 1.0)


def test_near_lossless_jpeg_ls() -> None:
    truth = make_noise(1, 16, 16)
    got = read_pixels(compress_dicom(make_dicom(truth, "MONOCHROME2"), uid.JPEGLSNearLossless, jls_error=2))
    assert np.abs(got[..., 0].astype(int) - truth).max() <= 2


@pytest.mark.parametrize("how", [{}, {"subsampling": 2}, {"progressive": True}], ids=str)
@pytest.mark.parametrize("colour", ["YBR_FULL_422", "YBR_FULL", "RGB", None])
def test_jpeg_with_jfif_marker_is_ybr(how: dict[str, object], colour: str | None) -> None:
    truth = np.stack([make_gradient(), make_gradient()[::-1]])
    data = make_dicom(truth, PhotometricInterpretation=colour)
    assert_close(
        read_pixels(
            encode_dicom(set_compressed_frames(data, [encode_jpeg(t, **how) for t in truth]), uid.JPEGBaseline8Bit)
        ),
        truth,
        3.0,
    )


def test_jpeg_that_stores_rgb() -> None:
    truth = make_gradient()[None]
    stored = encode_jpeg(truth[0], keep_rgb=True)  # with Adobe's marker, transform 0, and components called R, G, B
    assert_close(
        read_pixels(encode_dicom(set_compressed_frames(make_dicom(truth), [stored]), uid.JPEGBaseline8Bit)), truth, 2.0
    )
    assert_close(
        read_pixels(
            encode_dicom(set_compressed_frames(make_dicom(truth, "YBR_FULL_422"), [stored]), uid.JPEGBaseline8Bit)
        ),
        truth,
        2.0,
    )


def test_jpeg_without_markers_uses_the_photometric_interpretation() -> None:
    truth = make_gradient()[None]
    stored = encode_jpeg(truth[0])
    bare = stored[:2] + stored[20:]  # JFIF is 18 bytes after the first marker
    assert stored[6:10] == b"JFIF"
    assert_close(
        read_pixels(
            encode_dicom(set_compressed_frames(make_dicom(truth, "YBR_FULL_422"), [bare]), uid.JPEGBaseline8Bit)
        ),
        truth,
        3.0,
    )
    as_rgb = convert_color_space(truth, "RGB", "YBR_FULL")
    assert_close(
        read_pixels(encode_dicom(set_compressed_frames(make_dicom(truth, "RGB"), [bare]), uid.JPEGBaseline8Bit)),
        as_rgb,
        3.0,
    )


def test_adobe_marker_of_a_jpeg() -> None:
    truth = make_gradient()[None]
    bare = encode_jpeg(truth[0])[:2] + encode_jpeg(truth[0])[20:]
    raw = convert_color_space(truth, "RGB", "YBR_FULL")
    for transform, colour, wanted in (
        (1, "RGB", truth),
        (1, "YBR_FULL_422", truth),
        (0, "YBR_FULL", truth),
        (0, "RGB", raw),
    ):
        adobe = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])
        marked = bare[:2] + adobe + bare[2:]
        assert_close(
            read_pixels(encode_dicom(set_compressed_frames(make_dicom(truth, colour), [marked]), uid.JPEGBaseline8Bit)),
            wanted,
            3.0,
        )


@pytest.mark.parametrize(
    "name",
    [
        *(f"SC_rgb_dcmtk_{how}" for how in ("+eb+cr", "+eb+cy+n1", "+eb+cy+n2", "+eb+cy+np", "+eb+cy+s2", "+eb+cy+s4")),
        *("SC_rgb_jpeg_dcmtk", "SC_rgb_jpeg_lossy_gdcm", "SC_rgb_gdcm_KY", "SC_rgb_jls_lossy_line"),
        *("SC_rgb_jls_lossy_sample", "SC_ybr_full_422_uncompressed", "SC_rgb_rle_16bit"),
    ],
)
def test_same_image_of_several_writers(name: str) -> None:
    assert_close(read_pixels(load_pydicom_file(f"{name}.dcm")), read_pixels(load_pydicom_file("SC_rgb_rle.dcm")), 4.0)


def test_one_bit_image() -> None:
    got = read_pixels(load_pydicom_file("liver_1frame.dcm"))
    assert np.unique(got).tolist() == [0, 255]


def test_gray_jpeg_and_12_bits() -> None:
    truth = make_gradient()[None, ..., 0]
    assert_close(
        read_pixels(
            encode_dicom(
                set_compressed_frames(make_dicom(truth, "MONOCHROME2"), [encode_jpeg(truth[0])]), uid.JPEGBaseline8Bit
            )
        )[..., 0],
        truth,
        1.0,
    )
    assert read_pixels(load_pydicom_file("JPGExtended.dcm")).shape == (1, 1024, 256, 3)
