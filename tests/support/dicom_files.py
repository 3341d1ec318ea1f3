"""Small DICOM files whose pixels are known."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from PIL import Image
from pydicom import uid
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.filewriter import dcmwrite
from pydicom.pixels.encoders.base import get_encoder

from deploy.imaging.images import read_image_bytes
from pipeline.core.errors import DataError


def smooth(rows: int = 24, columns: int = 32) -> np.ndarray:
    """(H, W, 3): lossy formats keep it nearly as it is, and no two channels are alike."""
    y, x = np.mgrid[:rows, :columns]
    return np.stack([x * 255 // (columns - 1), y * 255 // (rows - 1), 255 - x * 200 // (columns - 1)], -1).astype(
        np.uint8
    )


def noise(*shape: int, bits: int = 8, seed: int = 0) -> np.ndarray:
    kind = np.uint8 if bits <= 8 else np.uint16
    return np.random.default_rng(seed).integers(0, 2**bits, shape).astype(kind)


def image(pixels: np.ndarray, colour: str = "RGB", **tags: object) -> Dataset:
    """(F, H, W) or (F, H, W, 3), as the samples are stored; a tag of None is left out."""
    data = Dataset()
    data.SOPClassUID, data.SOPInstanceUID = uid.VLPhotographicImageStorage, uid.generate_uid()
    data.StudyInstanceUID, data.SeriesInstanceUID = uid.generate_uid(), uid.generate_uid()
    data.Modality, data.PatientID, data.PatientName = "XC", "7", "A^B"
    data.SamplesPerPixel = 3 if pixels.ndim == 4 else 1
    data.Rows, data.Columns = pixels.shape[1:3]
    data.PhotometricInterpretation = colour
    if data.SamplesPerPixel == 3:
        data.PlanarConfiguration = 0
    data.BitsAllocated = data.BitsStored = 8 * pixels.dtype.itemsize
    data.PixelRepresentation = int(pixels.dtype.kind == "i")
    if len(pixels) > 1:
        data.NumberOfFrames = len(pixels)
    raw = pixels.tobytes()
    data.add_new("PixelData", "OB" if pixels.dtype.itemsize == 1 else "OW", raw + b"\0" * (len(raw) % 2))
    change(data, **tags)
    data.HighBit = tags.get("HighBit", data.get("BitsStored", 8) - 1)
    return data


def change(data: Dataset, **tags: object) -> Dataset:
    for key, value in tags.items():
        if value is not None:
            setattr(data, key, value)
        elif key in data:
            delattr(data, key)
    return data


def wrap(data: Dataset, frames: list[bytes]) -> Dataset:
    """Compressed frames instead of the pixels."""
    data.add_new("PixelData", "OB", encapsulate(frames))
    data["PixelData"].is_undefined_length = True
    return data


def file(data: Dataset, syntax: uid.UID = uid.ExplicitVRLittleEndian) -> bytes:
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = syntax
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wrong on purpose
        dcmwrite(out, data, enforce_file_format=True)
    return out.getvalue()


def packed(data: Dataset, syntax: uid.UID, **how: object) -> bytes:
    """Compressed by pydicom's own encoders."""
    encoder = get_encoder(syntax)
    count = int(data.get("NumberOfFrames", 1))
    frames = [encoder.encode(data, index=i, **how) for i in range(count)]
    return file(wrap(data, frames), syntax)


def jpeg(pixels: np.ndarray, **how: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=97, **how)
    return out.getvalue()


def shipped(name: str) -> bytes:
    """One of the files in pydicom's wheel."""
    found = get_testdata_file(name, download=False)
    assert isinstance(found, str)
    with open(found, "rb") as stream:  # noqa: PTH123
        return stream.read()


def pixels(data: bytes) -> np.ndarray:
    """(F, H, W, 3)"""
    return np.stack([p.pixels for p in read_image_bytes(data, "x")])


def near(got: np.ndarray, truth: np.ndarray, mean: float) -> None:
    assert got.shape == truth.shape
    assert got.dtype == np.uint8
    assert np.abs(got.astype(int) - truth).mean() < mean


def refused(data: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_image_bytes(data, "x.dcm")
    assert str(caught.value).startswith("x.dcm: ")
    assert ";" in str(caught.value)  # there is a cure
