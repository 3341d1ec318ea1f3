"""Factories of small DICOM files with known pixels."""

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


def make_gradient(rows: int = 24, columns: int = 32) -> np.ndarray:
    """(H, W, 3): survives lossy compression, and no two channels are equal."""
    y, x = np.mgrid[:rows, :columns]
    return np.stack([x * 255 // (columns - 1), y * 255 // (rows - 1), 255 - x * 200 // (columns - 1)], -1).astype(
        np.uint8
    )


def make_noise(*shape: int, bits: int = 8, seed: int = 0) -> np.ndarray:
    dtype = np.uint8 if bits <= 8 else np.uint16
    return np.random.default_rng(seed).integers(0, 2**bits, shape).astype(dtype)


def make_dicom(pixels: np.ndarray, photometric_interpretation: str = "RGB", **tags: object) -> Dataset:
    """(F, H, W) or (F, H, W, 3), as the samples are stored; a tag of None is omitted."""
    data = Dataset()
    data.SOPClassUID, data.SOPInstanceUID = uid.VLPhotographicImageStorage, uid.generate_uid()
    data.StudyInstanceUID, data.SeriesInstanceUID = uid.generate_uid(), uid.generate_uid()
    data.Modality, data.PatientID, data.PatientName = "XC", "7", "A^B"
    data.SamplesPerPixel = 3 if pixels.ndim == 4 else 1
    data.Rows, data.Columns = pixels.shape[1:3]
    data.PhotometricInterpretation = photometric_interpretation
    if data.SamplesPerPixel == 3:
        data.PlanarConfiguration = 0
    data.BitsAllocated = data.BitsStored = 8 * pixels.dtype.itemsize
    data.PixelRepresentation = int(pixels.dtype.kind == "i")
    if len(pixels) > 1:
        data.NumberOfFrames = len(pixels)
    raw = pixels.tobytes()
    data.add_new("PixelData", "OB" if pixels.dtype.itemsize == 1 else "OW", raw + b"\0" * (len(raw) % 2))
    set_tags(data, **tags)
    data.HighBit = tags.get("HighBit", data.get("BitsStored", 8) - 1)
    return data


def set_tags(data: Dataset, **tags: object) -> Dataset:
    for key, value in tags.items():
        if value is not None:
            setattr(data, key, value)
        elif key in data:
            delattr(data, key)
    return data


def set_compressed_frames(data: Dataset, frames: list[bytes]) -> Dataset:
    """Replaces the pixels by compressed frames."""
    data.add_new("PixelData", "OB", encapsulate(frames))
    data["PixelData"].is_undefined_length = True
    return data


def encode_dicom(data: Dataset, syntax: uid.UID = uid.ExplicitVRLittleEndian) -> bytes:
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = syntax
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deliberately invalid
        dcmwrite(buffer, data, enforce_file_format=True)
    return buffer.getvalue()


def compress_dicom(data: Dataset, syntax: uid.UID, **options: object) -> bytes:
    """Compressed by pydicom's own encoders."""
    encoder = get_encoder(syntax)
    count = int(data.get("NumberOfFrames", 1))
    frames = [encoder.encode(data, index=i, **options) for i in range(count)]
    return encode_dicom(set_compressed_frames(data, frames), syntax)


def encode_jpeg(pixels: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=97, **options)
    return buffer.getvalue()


def load_pydicom_file(name: str) -> bytes:
    """A test file of pydicom's wheel."""
    found = get_testdata_file(name, download=False)
    assert isinstance(found, str)
    with open(found, "rb") as stream:  # noqa: PTH123
        return stream.read()


def read_pixels(data: bytes) -> np.ndarray:
    """(F, H, W, 3)"""
    return np.stack([p.pixels for p in read_image_bytes(data, "x")])


def assert_close(actual: np.ndarray, expected: np.ndarray, max_mean_error: float) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == np.uint8
    assert np.abs(actual.astype(int) - expected).mean() < max_mean_error


def assert_refused(data: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_image_bytes(data, "x.dcm")
    assert str(caught.value).startswith("x.dcm: ")
    assert ";" in str(caught.value)  # followed by a cure
