"""Image folders and small DICOM files as a hospital might have them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

PATIENT_NAME, PATIENT_ID = "Müller^Anna", "4711-0815"


def make_textures(count: int, side: int = 48, seed: int = 0) -> np.ndarray:
    """(count, side, side, 3) uint8; each image is different."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(70, 180, (count, 12, 12, 3), np.uint8)
    smooth = np.stack([cv2.resize(image, (side, side), interpolation=cv2.INTER_CUBIC) for image in coarse])
    return np.clip(smooth + rng.normal(0, 4, smooth.shape), 0, 255).astype(np.uint8)


def encode_image(pixels: np.ndarray, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, image_format, **options)
    return buffer.getvalue()


def write_image(path: Path, pixels: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_smear_folder(
    folder: Path, count: int = 60, classes: tuple[str, ...] = ("normal", "schistocyte"), seed: int = 0
) -> Path:
    """A folder for each class, with different images."""
    for index, pixels in enumerate(make_textures(count, seed=seed)):
        write_image(folder / classes[index % len(classes)] / f"{index:03}.png", pixels)
    return folder


def make_dicom_dataset(**attributes: Any) -> Dataset:
    dataset = Dataset()
    dataset.SpecificCharacterSet = "ISO_IR 192"
    dataset.SOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"
    dataset.SOPInstanceUID = "1.2.3.4.5"
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


def write_dicom(path: Path, preamble: bool = True, private: str = "", **attributes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset = make_dicom_dataset(**attributes)
    if private:
        dataset.private_block(0x0009, "ACME", create=True).add_new(1, "LO", private)
    if preamble:
        dataset.file_meta = FileMetaDataset()
        dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        dataset.save_as(path, enforce_file_format=True)
    else:
        dataset.save_as(path, implicit_vr=True, little_endian=True)
    return path
