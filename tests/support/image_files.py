"""Files that a hospital might have: pictures with texture of their own, and small DICOM objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

NAME, NUMBER = "Müller^Anna", "4711-0815"


def textures(count: int, side: int = 48, seed: int = 0) -> np.ndarray:
    """(count, side, side, 3) uint8, no two alike"""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(70, 180, (count, 12, 12, 3), np.uint8)
    smooth = np.stack([cv2.resize(one, (side, side), interpolation=cv2.INTER_CUBIC) for one in coarse])
    return np.clip(smooth + rng.normal(0, 4, smooth.shape), 0, 255).astype(np.uint8)


def picture(path: Path, pixels: np.ndarray, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def smears(folder: Path, count: int = 60, classes: tuple[str, ...] = ("normal", "schistocyte"), seed: int = 0) -> Path:
    """A folder of each class, with distinct images."""
    for at, pixels in enumerate(textures(count, seed=seed)):
        picture(folder / classes[at % len(classes)] / f"{at:03}.png", pixels)
    return folder


def dataset(**attributes: Any) -> Dataset:
    found = Dataset()
    found.SpecificCharacterSet = "ISO_IR 192"
    found.SOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"
    found.SOPInstanceUID = "1.2.3.4.5"
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def dicom(path: Path, preamble: bool = True, private: str = "", **attributes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = dataset(**attributes)
    if private:
        found.private_block(0x0009, "ACME", create=True).add_new(1, "LO", private)
    if preamble:
        found.file_meta = FileMetaDataset()
        found.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        found.save_as(path, enforce_file_format=True)
    else:
        found.save_as(path, implicit_vr=True, little_endian=True)
    return path
