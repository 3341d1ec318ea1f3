"""Writes a rendered field as a DICOM visible-light microscopic image, for demos without patient data."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian, VLMicroscopicImageStorage, generate_uid

ACQUIRED_AT = datetime(2026, 1, 1, 8, 0)  # arbitrary, but fixed


def save_microscopy(image: NDArray[np.uint8], path: Path, instance_number: int, seed: int) -> Path:
    """(H, W, 3) RGB; the fields of one seed are one series of one study."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = VLMicroscopicImageStorage
    meta.MediaStorageSOPInstanceUID = _generate_uid("field", seed, instance_number)
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    ds.SOPClassUID, ds.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    ds.PatientName, ds.PatientID, ds.PatientBirthDate, ds.PatientSex = (
        f"Rendered^Patient {seed}",
        f"rendered-{seed}",
        "",
        "O",
    )
    ds.StudyInstanceUID, ds.SeriesInstanceUID = _generate_uid("study", seed), _generate_uid("series", seed)
    ds.StudyDate = ds.ContentDate = ds.AcquisitionDate = ACQUIRED_AT.strftime("%Y%m%d")
    ds.StudyTime = ds.ContentTime = ds.AcquisitionTime = ACQUIRED_AT.strftime("%H%M%S")
    ds.AcquisitionDateTime = ACQUIRED_AT.strftime("%Y%m%d%H%M%S")
    ds.StudyID, ds.AccessionNumber, ds.ReferringPhysicianName = str(seed), "", ""
    ds.Modality, ds.SeriesNumber, ds.InstanceNumber = "GM", 1, instance_number
    ds.Manufacturer, ds.SeriesDescription = "hemofed", "rendered blood smear, no patient"
    ds.Laterality, ds.PatientOrientation, ds.LossyImageCompression = "", "", "00"
    ds.ImageType = ["DERIVED", "PRIMARY"]
    ds.Rows, ds.Columns = image.shape[:2]
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.PlanarConfiguration = 3, "RGB", 0
    ds.BitsAllocated = ds.BitsStored = 8
    ds.HighBit, ds.PixelRepresentation = 7, 0
    ds.PixelData = image.tobytes()
    ds.save_as(path, enforce_file_format=True)
    return path


def _generate_uid(*parts: object) -> UID:
    return generate_uid(entropy_srcs=["hemofed demo slide", *map(str, parts)])
