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
from tests.support.dicom_files import (
    change,
    file,
    image,
    jpeg,
    near,
    noise,
    packed,
    pixels,
    refused,
    shipped,
    smooth,
    wrap,
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
    truth = noise(count, *size, 3)
    assert (pixels(file(image(truth), syntax)) == truth).all()


@pytest.mark.parametrize("syntax", PLAIN, ids=lambda s: s.name)
def test_uncompressed_16_bit_grey(syntax: uid.UID) -> None:
    truth = noise(2, 4, 6, bits=16)
    stored = truth.byteswap().view(truth.dtype.newbyteorder()) if not syntax.is_little_endian else truth
    got = pixels(file(image(stored, "MONOCHROME2"), syntax))
    assert (got == (truth >> 8)[..., None]).all()


def test_colours_by_plane() -> None:
    truth = noise(2, 4, 6, 3)
    planes = np.ascontiguousarray(truth.transpose(0, 3, 1, 2))
    data = image(truth, PlanarConfiguration=1, PixelData=planes.tobytes())
    assert (pixels(file(data)) == truth).all()


def test_ybr_full() -> None:
    truth = smooth()[None]
    near(pixels(file(image(convert_color_space(truth, "RGB", "YBR_FULL"), "YBR_FULL"))), truth, 1.0)


def test_ybr_422_shares_colour_between_neighbours() -> None:
    ybr = convert_color_space(smooth()[None], "RGB", "YBR_FULL")
    ybr[:, :, 1::2, 1:] = ybr[:, :, ::2, 1:]
    stored = np.stack([ybr[:, :, ::2, 0], ybr[:, :, 1::2, 0], ybr[:, :, ::2, 1], ybr[:, :, ::2, 2]], -1)
    data = image(ybr, "YBR_FULL_422", PixelData=stored.tobytes())
    truth = convert_color_space(ybr, "YBR_FULL", "RGB")
    assert (pixels(file(data)) == truth).all()
    change(data, PhotometricInterpretation=None)  # two bytes a pixel leave no doubt
    assert (pixels(file(data)) == truth).all()


@pytest.mark.parametrize("bits", [8, 10, 12, 16])
@pytest.mark.parametrize("colour", ["MONOCHROME1", "MONOCHROME2"])
def test_grey_by_the_full_range_of_bits(bits: int, colour: str) -> None:
    truth = noise(1, 5, 4, bits=bits)
    eight = (truth >> (bits - 8)).astype(np.uint8)[..., None]
    got = pixels(file(image(truth, colour, BitsStored=bits)))
    assert (got == (eight if colour == "MONOCHROME2" else 255 - eight)).all()


def test_signed_grey_and_falling_rescale() -> None:
    stored = np.array([[[-2048, -1, 0, 2047]]], np.int16)
    data = image(stored, "MONOCHROME2", BitsStored=12)
    assert pixels(file(data))[0, 0, :, 0].tolist() == [0, 127, 128, 255]
    change(data, RescaleSlope="-1", RescaleIntercept="0")
    assert pixels(file(data))[0, 0, :, 0].tolist() == [255, 128, 127, 0]


def test_window_after_rescale() -> None:
    stored = np.array([[[0, 10, 15, 20, 30, 255]]], np.uint8)
    # values 2 x - 10: -10, 10, 20, 30, 50, 500; the window of 41 around 30.5 runs from 10 to 50
    window = {"RescaleSlope": "2", "RescaleIntercept": "-10", "WindowCenter": ["30.5", "9"], "WindowWidth": ["41", "9"]}
    got = pixels(file(image(stored, "MONOCHROME2", **window)))
    assert got[0, 0, :, 0].tolist() == [0, 0, 64, 128, 255, 255]
    assert (pixels(file(image(stored, "MONOCHROME1", **window))) == 255 - got).all()
    exact = pixels(
        file(image(stored, "MONOCHROME2", WindowCenter="20", WindowWidth="20", VOILUTFunction="LINEAR_EXACT"))
    )
    assert exact[0, 0, :, 0].tolist() == [0, 0, 64, 128, 255, 255]
    bent = pixels(file(image(stored, "MONOCHROME2", WindowCenter="20", WindowWidth="20", VOILUTFunction="SIGMOID")))
    assert bent[0, 0, 3, 0] == 128
    zero = pixels(file(image(stored, "MONOCHROME2", WindowCenter="0", WindowWidth="0")))
    assert (zero[..., 0] == stored).all()


def test_palette() -> None:
    truth = noise(1, 4, 5) & 7
    table = noise(8, 3, bits=16, seed=1)
    tags: dict[str, object] = {}
    for channel, name in enumerate(("Red", "Green", "Blue")):
        tags[f"{name}PaletteColorLookupTableDescriptor"] = [8, 0, 16]
        tags[f"{name}PaletteColorLookupTableData"] = table[:, channel].tobytes()
    assert (pixels(file(image(truth, "PALETTE COLOR", **tags))) == (table >> 8)[truth]).all()
    for channel, name in enumerate(("Red", "Green", "Blue")):  # 8-bit values in 16-bit entries
        tags[f"{name}PaletteColorLookupTableData"] = (table[:, channel] >> 8).tobytes()
    assert (pixels(file(image(truth, "PALETTE COLOR", **tags))) == (table >> 8)[truth]).all()
    assert pixels(shipped("examples_palette.dcm")).shape == (1, 350, 800, 3)


@pytest.mark.parametrize("name", ["bigendian", "expb", "implicit", "RLE", "jp2klossless", "jpeg_ls_lossless", "padded"])
def test_one_picture_in_every_wrapping(name: str) -> None:
    assert (pixels(shipped(f"MR_small_{name}.dcm")) == pixels(shipped("MR_small.dcm"))).all()


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
    (tmp_path / "a.dcm").write_bytes(file(image(noise(2, 4, 4, 3), SOPClassUID=sop)))
    got = read_dicom(tmp_path / "a.dcm", "a.dcm")
    assert [(p.name, p.frame_number, p.dicom_path) for p in got] == [
        ("a.dcm#1", 1, tmp_path / "a.dcm"),
        ("a.dcm#2", 2, tmp_path / "a.dcm"),
    ]
    [single] = read_image_bytes(file(image(noise(1, 4, 4, 3), SOPClassUID=sop)), "-")
    assert (single.name, single.frame_number, single.dicom_path) == ("-", 1, None)


def test_windows_of_functional_groups() -> None:
    data = image(np.array([[[0, 128, 255]]] * 2, np.uint8), "MONOCHROME2")
    window = [change(type(data)(), WindowCenter="10", WindowWidth="2")]
    data.SharedFunctionalGroupsSequence = [change(type(data)(), FrameVOILUTSequence=window)]
    assert pixels(file(data))[:, 0, :, 0].tolist() == [[0, 255, 255]] * 2


def test_without_preamble_and_meta() -> None:
    truth = noise(1, 8, 8, 3)
    for syntax in PLAIN[:3]:
        whole = file(image(truth), syntax)
        assert (pixels(whole[132:]) == truth).all()
        length = 144 + int.from_bytes(whole[140:144], "little")
        assert (pixels(whole[length:]) == truth).all()
    compressed = packed(image(truth), uid.RLELossless)
    refused(compressed[144 + int.from_bytes(compressed[140:144], "little") :], "without a transfer syntax")


def test_missing_tags_that_leave_no_doubt() -> None:
    truth = noise(1, 4, 4, 3)
    data = image(truth, PhotometricInterpretation=None, PixelRepresentation=None, BitsStored=None, NumberOfFrames=None)
    assert (pixels(file(change(data, HighBit=None))) == truth).all()
    truth = noise(1, 64, 64, 3)
    bare = image(truth, PlanarConfiguration=None, Rows=None, Columns=None, SamplesPerPixel=None, BitsAllocated=None)
    colours = packed(image(truth, "YBR_RCT"), uid.JPEG2000Lossless)
    stream = dcmread(io.BytesIO(colours)).PixelData
    bare.add_new("PixelData", "OB", stream)
    bare["PixelData"].is_undefined_length = True
    assert (pixels(file(bare, uid.JPEG2000Lossless)) == truth).all()


@pytest.mark.parametrize("declared", [None, 1, 2])
def test_compressed_frames_are_counted_not_believed(declared: int | None) -> None:
    truth = noise(3, 4, 4)
    data = image(truth, "MONOCHROME2")
    frames = [jpeg(t) for t in truth]
    change(data, NumberOfFrames=declared)
    assert len(pixels(file(wrap(data, frames), uid.JPEGBaseline8Bit))) == 3
    refused(file(change(data, NumberOfFrames=4), uid.JPEGBaseline8Bit), "3 of 4 frames")


def test_a_frame_in_several_fragments() -> None:
    truth = smooth()[None]
    whole = jpeg(truth[0])
    whole += b"\0" * (len(whole) % 2)
    data = wrap(image(truth, "YBR_FULL_422"), [whole[:100], whole[100:]])
    near(pixels(file(data, uid.JPEGBaseline8Bit)), truth, 3.0)


def test_refusals_of_headers() -> None:
    rgb = noise(1, 4, 4, 3)
    grey = noise(1, 4, 4)
    refused(file(image(rgb, PlanarConfiguration=None)), "order of the colours")
    refused(file(image(grey, "MONOCHROME2", PhotometricInterpretation=None)), "swapped")
    refused(file(image(rgb, "HSV")), "HSV with 3 samples")
    refused(file(image(grey, "RGB")), "RGB with 1 samples")
    refused(file(image(grey, "MONOCHROME2", Rows=None)), "Rows")
    refused(file(image(grey, "MONOCHROME2", Rows=5)), "cut short")
    refused(file(image(rgb, Rows=2)), "correct Number of Frames")
    refused(file(image(rgb, NumberOfFrames=2)), "cut short")
    refused(file(image(grey, "MONOCHROME2", HighBit=3)), "High Bit")
    refused(file(image(noise(1, 4, 4, bits=16), "MONOCHROME2", BitsStored=12, HighBit=15)), "High Bit")
    refused(file(image(grey, "MONOCHROME2", RescaleSlope="0", RescaleIntercept="0")), "slope 0")
    refused(file(image(grey, "MONOCHROME2", ModalityLUTSequence=[])), "lookup table")
    refused(file(image(rgb, ImageType=["ORIGINAL", "PRIMARY", "LABEL", "NONE"])), "label image")
    refused(file(image(grey, "PALETTE COLOR")), "damaged DICOM")
    refused(shipped("rtdose.dcm"), "32 bits")
    refused(shipped("MR_truncated.dcm"), "cut short")
    refused(shipped("test-SR.dcm"), "without pixel data .Comprehensive SR")
    refused(file(image(rgb)).replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.9.9.9\0"), "unknown transfer syntax")
    refused(file(wrap(image(rgb), [b"\0\0\1\xb3"]), uid.MPEG2MPML), "is not read")
    lying = file(wrap(image(rgb), [jpeg(rgb[0])]), uid.JPEGBaseline8Bit)
    refused(lying.replace(b"10008.1.2.4.50", b"10008.1.2.1\0\0\0"), "compressed, but the header says Explicit")
    refused(b"\x08\0\x05\0" + b"nothing of the sort" * 20, "x.dcm")


def test_refusals_of_streams() -> None:
    rgb = smooth()[None]
    good = jpeg(rgb[0])
    base = uid.JPEGBaseline8Bit
    refused(file(wrap(image(rgb, "YBR_FULL_422"), [good[:-200]]), base), "cut short")
    refused(file(wrap(image(rgb, "YBR_FULL_422", Rows=99), [good]), base), "Rows is 99, but")
    refused(file(wrap(image(rgb[..., 0], "MONOCHROME2"), [good]), base), "SamplesPerPixel is 1")
    refused(file(wrap(image(rgb, "YBR_FULL_422"), [good, jpeg(rgb[0, :8])]), base), "frame 2 says")
    refused(file(wrap(image(rgb, "YBR_FULL_422"), [b"no JPEG at all\xff\xd9"]), base), "neither JPEG")
    refused(file(wrap(image(rgb), []), base), "no frame")
    whole = dcmread(io.BytesIO(packed(image(rgb), uid.RLELossless)))
    refused(file(change(whole, Rows=whole.Rows // 2), uid.RLELossless), "more than Rows and Columns")
    refused(file(change(whole, Rows=whole.Rows * 4), uid.RLELossless), "damaged DICOM")


def test_bombs_are_refused_by_their_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = noise(1, 2, 2)
    refused(file(image(tiny, "MONOCHROME2", Rows=30_000, Columns=30_000)), "80 million pixels in a frame")
    refused(file(image(tiny, "MONOCHROME2", NumberOfFrames=2_001)), "2001 frames")
    refused(file(image(tiny, "MONOCHROME2", Rows=5_000, Columns=5_000, NumberOfFrames=17)), "400 million")
    # the header is modest, the stream is not
    stream = bytearray(jpeg(tiny[0]))
    at = stream.index(b"\xff\xc0")
    stream[at + 5 : at + 9] = (30_000).to_bytes(2, "big") * 2
    refused(file(wrap(image(tiny, "MONOCHROME2"), [bytes(stream)]), uid.JPEGBaseline8Bit), "say 30000")
    monkeypatch.setattr("deploy.imaging.dicom_reader.MAX_TOTAL", 0)
    deflated = file(image(tiny, "MONOCHROME2"), uid.DeflatedExplicitVRLittleEndian)
    length = 144 + int.from_bytes(deflated[140:144], "little")
    squeeze = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    bomb = deflated[:length] + squeeze.compress(bytes(2**25)) + squeeze.flush()
    refused(bomb, "unpacks to more")
    refused(
        bomb[:140] + b"\xff\xff\0\0" + bomb[144:], "unpacks to more"
    )  # the length of the meta group is not believed
    refused(deflated[:-20], "cut short inside")
    text = image(tiny, "MONOCHROME2", ImageComments=f"not {uid.DeflatedExplicitVRLittleEndian}")
    assert (pixels(file(text))[..., 0] == tiny).all()


def test_missing_plugin_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoPlugins:
        available_plugins = ()

    data = packed(image(smooth()[None, ..., 0], "MONOCHROME2"), uid.JPEGLSLossless)
    monkeypatch.setattr(dicom_frames, "get_decoder", lambda syntax: NoPlugins())
    refused(data, r"pip install 'hemofed\[edge-smear\]'")
