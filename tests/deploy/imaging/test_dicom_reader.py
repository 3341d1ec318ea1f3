from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread, uid
from pydicom.pixels.processing import convert_color_space

from deploy.imaging import dicom_frames
from deploy.imaging.dicom_reader import read_dicom
from deploy.imaging.images import read_image_bytes
from deploy.imaging.input_image import SlideIdentity
from tests.support.dicom_files import (
    assert_close,
    assert_refused,
    compress_dicom,
    encode_dicom,
    encode_jpeg,
    load_pydicom_file,
    make_dicom,
    make_gradient,
    make_noise,
    read_pixels,
    set_compressed_frames,
    set_tags,
)

PLAIN = [
    uid.ImplicitVRLittleEndian,
    uid.ExplicitVRLittleEndian,
    uid.ExplicitVRBigEndian,
    uid.DeflatedExplicitVRLittleEndian,
]


@pytest.mark.parametrize("syntax", PLAIN, ids=lambda s: s.name)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", [(4, 6), (3, 3)])  # 27 bytes are padded to 28
def test_uncompressed_rgb(syntax: uid.UID, count: int, size: tuple[int, int]) -> None:
    truth = make_noise(count, *size, 3)
    assert (read_pixels(encode_dicom(make_dicom(truth), syntax)) == truth).all()


@pytest.mark.parametrize("syntax", PLAIN, ids=lambda s: s.name)
def test_uncompressed_16_bit_gray(syntax: uid.UID) -> None:
    truth = make_noise(2, 4, 6, bits=16)
    stored = truth.byteswap().view(truth.dtype.newbyteorder()) if not syntax.is_little_endian else truth
    got = read_pixels(encode_dicom(make_dicom(stored, "MONOCHROME2"), syntax))
    assert (got == (truth >> 8)[..., None]).all()


def test_planar_configuration_by_plane() -> None:
    truth = make_noise(2, 4, 6, 3)
    planes = np.ascontiguousarray(truth.transpose(0, 3, 1, 2))
    data = make_dicom(truth, PlanarConfiguration=1, PixelData=planes.tobytes())
    assert (read_pixels(encode_dicom(data)) == truth).all()


def test_ybr_full() -> None:
    truth = make_gradient()[None]
    assert_close(
        read_pixels(encode_dicom(make_dicom(convert_color_space(truth, "RGB", "YBR_FULL"), "YBR_FULL"))), truth, 1.0
    )


def test_ybr_full_422() -> None:
    ybr = convert_color_space(make_gradient()[None], "RGB", "YBR_FULL")
    ybr[:, :, 1::2, 1:] = ybr[:, :, ::2, 1:]
    stored = np.stack([ybr[:, :, ::2, 0], ybr[:, :, 1::2, 0], ybr[:, :, ::2, 1], ybr[:, :, ::2, 2]], -1)
    data = make_dicom(ybr, "YBR_FULL_422", PixelData=stored.tobytes())
    truth = convert_color_space(ybr, "YBR_FULL", "RGB")
    assert (read_pixels(encode_dicom(data)) == truth).all()
    set_tags(data, PhotometricInterpretation=None)  # two bytes per pixel are unambiguous
    assert (read_pixels(encode_dicom(data)) == truth).all()


@pytest.mark.parametrize("bits", [8, 10, 12, 16])
@pytest.mark.parametrize("colour", ["MONOCHROME1", "MONOCHROME2"])
def test_gray_is_scaled_by_the_full_range_of_bits(bits: int, colour: str) -> None:
    truth = make_noise(1, 5, 4, bits=bits)
    eight = (truth >> (bits - 8)).astype(np.uint8)[..., None]
    got = read_pixels(encode_dicom(make_dicom(truth, colour, BitsStored=bits)))
    assert (got == (eight if colour == "MONOCHROME2" else 255 - eight)).all()


def test_signed_gray_and_negative_rescale_slope() -> None:
    stored = np.array([[[-2048, -1, 0, 2047]]], np.int16)
    data = make_dicom(stored, "MONOCHROME2", BitsStored=12)
    assert read_pixels(encode_dicom(data))[0, 0, :, 0].tolist() == [0, 127, 128, 255]
    set_tags(data, RescaleSlope="-1", RescaleIntercept="0")
    assert read_pixels(encode_dicom(data))[0, 0, :, 0].tolist() == [255, 128, 127, 0]


def test_window_after_rescale() -> None:
    stored = np.array([[[0, 10, 15, 20, 30, 255]]], np.uint8)
    # values 2 x - 10: -10, 10, 20, 30, 50, 500; the window of 41 around 30.5 runs from 10 to 50
    window = {"RescaleSlope": "2", "RescaleIntercept": "-10", "WindowCenter": ["30.5", "9"], "WindowWidth": ["41", "9"]}
    got = read_pixels(encode_dicom(make_dicom(stored, "MONOCHROME2", **window)))
    assert got[0, 0, :, 0].tolist() == [0, 0, 64, 128, 255, 255]
    assert (read_pixels(encode_dicom(make_dicom(stored, "MONOCHROME1", **window))) == 255 - got).all()
    exact = read_pixels(
        encode_dicom(
            make_dicom(stored, "MONOCHROME2", WindowCenter="20", WindowWidth="20", VOILUTFunction="LINEAR_EXACT")
        )
    )
    assert exact[0, 0, :, 0].tolist() == [0, 0, 64, 128, 255, 255]
    bent = read_pixels(
        encode_dicom(make_dicom(stored, "MONOCHROME2", WindowCenter="20", WindowWidth="20", VOILUTFunction="SIGMOID"))
    )
    assert bent[0, 0, 3, 0] == 128
    zero = read_pixels(encode_dicom(make_dicom(stored, "MONOCHROME2", WindowCenter="0", WindowWidth="0")))
    assert (zero[..., 0] == stored).all()


def test_palette_color() -> None:
    truth = make_noise(1, 4, 5) & 7
    table = make_noise(8, 3, bits=16, seed=1)
    tags: dict[str, object] = {}
    for channel, name in enumerate(("Red", "Green", "Blue")):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [8, 0, 16]
        tags[f"{name}PaletteColorLookupTableData"] = table[:, channel].tobytes()
    assert (read_pixels(encode_dicom(make_dicom(truth, "PALETTE COLOR", **tags))) == (table >> 8)[truth]).all()
    for channel, name in enumerate(("Red", "Green", "Blue")):  # 8-bit values in 16-bit entries
        tags[f"{name}PaletteColorLookupTableData"] = (table[:, channel] >> 8).tobytes()
    assert (read_pixels(encode_dicom(make_dicom(truth, "PALETTE COLOR", **tags))) == (table >> 8)[truth]).all()
    assert read_pixels(load_pydicom_file("examples_palette.dcm")).shape == (1, 350, 800, 3)


@pytest.mark.parametrize("name", ["bigendian", "expb", "implicit", "RLE", "jp2klossless", "jpeg_ls_lossless", "padded"])
def test_same_image_in_every_transfer_syntax(name: str) -> None:
    assert (
        read_pixels(load_pydicom_file(f"MR_small_{name}.dcm")) == read_pixels(load_pydicom_file("MR_small.dcm"))
    ).all()


@pytest.mark.parametrize(
    "sop",
    [
        uid.VLPhotographicImageStorage,
        uid.VLMicroscopicImageStorage,
        uid.VLSlideCoordinatesMicroscopicImageStorage,
        uid.VLWholeSlideMicroscopyImageStorage,
        uid.SecondaryCaptureImageStorage,
        uid.MultiFrameTrueColorSecondaryCaptureImageStorage,
    ],
    ids=lambda s: s.name,
)
def test_frames_are_named_and_refer_to_their_file(sop: uid.UID, tmp_path: Path) -> None:
    (tmp_path / "a.dcm").write_bytes(encode_dicom(make_dicom(make_noise(2, 4, 4, 3), SOPClassUID=sop)))
    got = read_dicom(tmp_path / "a.dcm", "a.dcm")
    assert [(p.name, p.frame_number, p.dicom_path) for p in got] == [
        ("a.dcm#1", 1, tmp_path / "a.dcm"),
        ("a.dcm#2", 2, tmp_path / "a.dcm"),
    ]
    [single] = read_image_bytes(encode_dicom(make_dicom(make_noise(1, 4, 4, 3), SOPClassUID=sop)), "-")
    assert (single.name, single.frame_number, single.dicom_path) == ("-", 1, None)


def test_windows_of_functional_groups() -> None:
    data = make_dicom(np.array([[[0, 128, 255]]] * 2, np.uint8), "MONOCHROME2")
    window = [set_tags(type(data)(), WindowCenter="10", WindowWidth="2")]
    data.SharedFunctionalGroupsSequence = [set_tags(type(data)(), FrameVOILUTSequence=window)]
    assert read_pixels(encode_dicom(data))[:, 0, :, 0].tolist() == [[0, 255, 255]] * 2


def test_without_preamble_and_meta() -> None:
    truth = make_noise(1, 8, 8, 3)
    for syntax in PLAIN[:3]:
        whole = encode_dicom(make_dicom(truth), syntax)
        assert (read_pixels(whole[132:]) == truth).all()
        length = 144 + int.from_bytes(whole[140:144], "little")
        assert (read_pixels(whole[length:]) == truth).all()
    compressed = compress_dicom(make_dicom(truth), uid.RLELossless)
    assert_refused(compressed[144 + int.from_bytes(compressed[140:144], "little") :], "without a transfer syntax")


def test_missing_tags_that_are_unambiguous() -> None:
    truth = make_noise(1, 4, 4, 3)
    data = make_dicom(
        truth, PhotometricInterpretation=None, PixelRepresentation=None, BitsStored=None, NumberOfFrames=None
    )
    assert (read_pixels(encode_dicom(set_tags(data, HighBit=None))) == truth).all()
    truth = make_noise(1, 64, 64, 3)
    bare = make_dicom(
        truth, PlanarConfiguration=None, Rows=None, Columns=None, SamplesPerPixel=None, BitsAllocated=None
    )
    colours = compress_dicom(make_dicom(truth, "YBR_RCT"), uid.JPEG2000Lossless)
    stream = dcmread(io.BytesIO(colours)).PixelData
    bare.add_new("PixelData", "OB", stream)
    bare["PixelData"].is_undefined_length = True
    assert (read_pixels(encode_dicom(bare, uid.JPEG2000Lossless)) == truth).all()


@pytest.mark.parametrize("declared", [None, 1, 2])
def test_compressed_frames_are_counted_in_the_pixel_data(declared: int | None) -> None:
    truth = make_noise(3, 4, 4)
    data = make_dicom(truth, "MONOCHROME2")
    frames = [encode_jpeg(t) for t in truth]
    set_tags(data, NumberOfFrames=declared)
    assert len(read_pixels(encode_dicom(set_compressed_frames(data, frames), uid.JPEGBaseline8Bit))) == 3
    assert_refused(encode_dicom(set_tags(data, NumberOfFrames=4), uid.JPEGBaseline8Bit), "3 of 4 frames")


def test_a_frame_in_several_fragments() -> None:
    truth = make_gradient()[None]
    whole = encode_jpeg(truth[0])
    whole += b"\0" * (len(whole) % 2)
    data = set_compressed_frames(make_dicom(truth, "YBR_FULL_422"), [whole[:100], whole[100:]])
    assert_close(read_pixels(encode_dicom(data, uid.JPEGBaseline8Bit)), truth, 3.0)


def test_invalid_dicom_headers_are_refused() -> None:
    rgb = make_noise(1, 4, 4, 3)
    grey = make_noise(1, 4, 4)
    assert_refused(encode_dicom(make_dicom(rgb, PlanarConfiguration=None)), "order of the color channels")
    assert_refused(encode_dicom(make_dicom(grey, "MONOCHROME2", PhotometricInterpretation=None)), "swapped")
    assert_refused(encode_dicom(make_dicom(rgb, "HSV")), "HSV with 3 samples")
    assert_refused(encode_dicom(make_dicom(grey, "RGB")), "RGB with 1 samples")
    assert_refused(encode_dicom(make_dicom(grey, "MONOCHROME2", Rows=None)), "Rows")
    assert_refused(encode_dicom(make_dicom(grey, "MONOCHROME2", Rows=5)), "truncated")
    assert_refused(encode_dicom(make_dicom(rgb, Rows=2)), "correct Number of Frames")
    assert_refused(encode_dicom(make_dicom(rgb, NumberOfFrames=2)), "truncated")
    assert_refused(encode_dicom(make_dicom(grey, "MONOCHROME2", HighBit=3)), "High Bit")
    assert_refused(
        encode_dicom(make_dicom(make_noise(1, 4, 4, bits=16), "MONOCHROME2", BitsStored=12, HighBit=15)), "High Bit"
    )
    assert_refused(encode_dicom(make_dicom(grey, "MONOCHROME2", RescaleSlope="0", RescaleIntercept="0")), "slope 0")
    assert_refused(encode_dicom(make_dicom(grey, "MONOCHROME2", ModalityLUTSequence=[])), "lookup table")
    assert_refused(encode_dicom(make_dicom(rgb, ImageType=["ORIGINAL", "PRIMARY", "LABEL", "NONE"])), "label image")
    assert_refused(encode_dicom(make_dicom(grey, "PALETTE COLOR")), "damaged DICOM")
    assert_refused(load_pydicom_file("rtdose.dcm"), "32 bits")
    assert_refused(load_pydicom_file("MR_truncated.dcm"), "truncated")
    assert_refused(load_pydicom_file("test-SR.dcm"), "without pixel data .Comprehensive SR")
    assert_refused(
        encode_dicom(make_dicom(rgb)).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.9.9.9\0"),
        "unknown transfer syntax",
    )
    assert_refused(
        encode_dicom(set_compressed_frames(make_dicom(rgb), [b"\0\0\1\xb3"]), uid.MPEG2MPML), "is not supported"
    )
    lying = encode_dicom(set_compressed_frames(make_dicom(rgb), [encode_jpeg(rgb[0])]), uid.JPEGBaseline8Bit)
    assert_refused(lying.replace(b"10008.1.2.4.50", b"10008.1.2.1\0\0\0"), "compressed, but the header says Explicit")
    assert_refused(b"\x08\0\x05\0" + b"nothing of the sort" * 20, "x.dcm")


def test_invalid_codestreams_are_refused() -> None:
    rgb = make_gradient()[None]
    good = encode_jpeg(rgb[0])
    base = uid.JPEGBaseline8Bit
    assert_refused(
        encode_dicom(set_compressed_frames(make_dicom(rgb, "YBR_FULL_422"), [good[:-200]]), base), "truncated"
    )
    assert_refused(
        encode_dicom(set_compressed_frames(make_dicom(rgb, "YBR_FULL_422", Rows=99), [good]), base), "Rows is 99, but"
    )
    assert_refused(
        encode_dicom(set_compressed_frames(make_dicom(rgb[..., 0], "MONOCHROME2"), [good]), base),
        "SamplesPerPixel is 1",
    )
    assert_refused(
        encode_dicom(set_compressed_frames(make_dicom(rgb, "YBR_FULL_422"), [good, encode_jpeg(rgb[0, :8])]), base),
        "frame 2 has",
    )
    assert_refused(
        encode_dicom(set_compressed_frames(make_dicom(rgb, "YBR_FULL_422"), [b"no JPEG at all\xff\xd9"]), base),
        "neither JPEG",
    )
    assert_refused(encode_dicom(set_compressed_frames(make_dicom(rgb), []), base), "no frame")
    whole = dcmread(io.BytesIO(compress_dicom(make_dicom(rgb), uid.RLELossless)))
    assert_refused(
        encode_dicom(set_tags(whole, Rows=whole.Rows // 2), uid.RLELossless),
        "more compressed pixels than Rows and Columns",
    )
    assert_refused(encode_dicom(set_tags(whole, Rows=whole.Rows * 4), uid.RLELossless), "damaged DICOM")


def test_dicom_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_noise(1, 2, 2)
    assert_refused(
        encode_dicom(make_dicom(tiny, "MONOCHROME2", Rows=30_000, Columns=30_000)), "80 million pixels in a frame"
    )
    assert_refused(encode_dicom(make_dicom(tiny, "MONOCHROME2", NumberOfFrames=2_001)), "2001 frames")
    assert_refused(
        encode_dicom(make_dicom(tiny, "MONOCHROME2", Rows=5_000, Columns=5_000, NumberOfFrames=17)), "400 million"
    )
    # a small size in the header, a huge one in the stream
    stream = bytearray(encode_jpeg(tiny[0]))
    at = stream.index(b"\xff\xc0")
    stream[at + 5 : at + 9] = (30_000).to_bytes(2, "big") * 2
    assert_refused(
        encode_dicom(set_compressed_frames(make_dicom(tiny, "MONOCHROME2"), [bytes(stream)]), uid.JPEGBaseline8Bit),
        "say 30000",
    )
    monkeypatch.setattr("deploy.imaging.dicom_reader.MAX_TOTAL_PIXELS", 0)
    deflated = encode_dicom(make_dicom(tiny, "MONOCHROME2"), uid.DeflatedExplicitVRLittleEndian)
    length = 144 + int.from_bytes(deflated[140:144], "little")
    squeeze = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    bomb = deflated[:length] + squeeze.compress(bytes(2**25)) + squeeze.flush()
    assert_refused(bomb, "unpacks to more")
    assert_refused(
        bomb[:140] + b"\xff\xff\0\0" + bomb[144:], "unpacks to more"
    )  # the declared length of the meta group is ignored
    assert_refused(deflated[:-20], "truncated inside")
    text = make_dicom(tiny, "MONOCHROME2", ImageComments=f"not {uid.DeflatedExplicitVRLittleEndian}")
    assert (read_pixels(encode_dicom(text))[..., 0] == tiny).all()


def test_missing_plugin_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPlugins:
        available_plugins = ()

    data = compress_dicom(make_dicom(make_gradient()[None, ..., 0], "MONOCHROME2"), uid.JPEGLSLossless)
    monkeypatch.setattr(dicom_frames, "get_decoder", lambda syntax: NoPlugins())
    assert_refused(data, r"pip install 'hemofed\[edge-smear\]'")


def test_identity_tells_patients_and_studies_apart_without_naming_them() -> None:
    def identity(**tags: object) -> SlideIdentity:
        [image] = read_image_bytes(
            encode_dicom(make_dicom(make_noise(1, 4, 4, 3), StudyInstanceUID="1.2", **tags)), "a"
        )
        assert image.identity is not None
        return image.identity

    first = identity()
    assert identity() == first
    assert identity(PatientName="C^D") == first, "the ID decides"
    assert identity(PatientID="8").patient != first.patient
    assert identity(PatientID="8").study == first.study
    assert identity(AccessionNumber="x").study != first.study
    assert identity(PatientID=None).patient != identity(PatientID=None, PatientName="C^D").patient
    assert identity(PatientID="A^B").patient != identity(PatientID=None, PatientName="A^B").patient
    assert "A^B" not in repr(first)
