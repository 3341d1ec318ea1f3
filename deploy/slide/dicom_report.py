"""Results as DICOM: a structured report (TID 1500) and overlays as secondary captures, both referring to their sources.

Patient and study are copied, so that an archive files the result with the images; the source's pixels are not copied.
Where no standard code fits exactly, the code comes from our private scheme 99HEMOFED.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import highdicom as hd
import numpy as np
import pydicom
from highdicom.sr import CodedConcept
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sr.codedict import codes
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from deploy.imaging.dicom_reader import OVERLAY_DERIVATION
from deploy.slide.dicom_sources import TYPE2_KEYWORDS, load_source_headers, wrap_source_errors
from pipeline.core.errors import DataError
from pipeline.core.files import write_atomically

CODING_SCHEME = "99HEMOFED"
SERIES_DESCRIPTION = "AI result, research use only"

# SNOMED CT displays 70310009 as "Schistocyte"; the DCM ones are of DICOM PS3.16.
SCHISTOCYTE = CodedConcept("70310009", "SCT", "Schistocyte")
COMMENT = CodedConcept("121106", "DCM", "Comment")
CONCLUSION = CodedConcept("121077", "DCM", "Conclusion")
SOURCE_IMAGE = CodedConcept("121322", "DCM", "Source image for image processing operation")
CELLS_UNIT = CodedConcept("{cells}", "UCUM", "cells")
PERCENT_UNIT = CodedConcept("%", "UCUM", "percent")


@dataclass(frozen=True)
class SlideFinding:
    """Content of the structured report; the numbers are those of the slide report."""

    num_cells: int
    num_schistocytes: int  # flagged
    prevalence: float  # corrected; fractions from 0 to 1, NaN if unknown
    prevalence_low: float
    prevalence_high: float
    verdict: str  # e.g. "cannot decide"
    model: str
    digest: str  # of the bundle
    software_version: str  # of hemofed
    notice: str  # "research use only, not a medical device"
    comments: tuple[str, ...] = ()  # warnings, operating point, exclusions

    @property
    def called_fraction(self) -> float:
        return self.num_schistocytes / self.num_cells if self.num_cells else math.nan


def _private_code(value: str, meaning: str) -> CodedConcept:
    return CodedConcept(value, CODING_SCHEME, meaning)


def write_structured_report(sources: Sequence[Path], finding: SlideFinding, output_path: Path) -> Path:
    """Writes one Comprehensive SR that refers to all `sources`; they must belong to one patient."""
    headers = load_source_headers(sources)
    with wrap_source_errors(sources[0]):
        report = hd.sr.ComprehensiveSR(
            evidence=headers,
            content=_build_content(headers, finding)[0],
            series_instance_uid=generate_uid(),
            series_number=1,
            sop_instance_uid=generate_uid(),
            instance_number=1,
            manufacturer="hemofed",
            is_complete=True,
            is_final=False,  # preliminary and unverified: unsigned
            transfer_syntax_uid=ExplicitVRLittleEndian,
        )
        report.SeriesDescription = SERIES_DESCRIPTION
        report.CodingSchemeIdentificationSequence = [_coding_scheme()]
        data = _encode_dicom(report)
    return write_atomically(output_path, data)


def _build_content(headers: Sequence[Dataset], finding: SlideFinding) -> hd.sr.MeasurementReport:
    measurements = (
        (_private_code("CELLS", "Red blood cells examined"), finding.num_cells, CELLS_UNIT),
        (_private_code("CALLED", "Cells called schistocyte"), finding.num_schistocytes, CELLS_UNIT),
        (
            _private_code("SHARE_CALLED", "Share of cells called schistocyte"),
            100 * finding.called_fraction,
            PERCENT_UNIT,
        ),
        # meanings have at most 64 letters
        (
            _private_code("CORRECTED", "Share of schistocytes, corrected for the model's errors"),
            100 * finding.prevalence,
            PERCENT_UNIT,
        ),
        (
            _private_code("CORRECTED_LOW", "Corrected share of schistocytes, lower limit, 95 %"),
            100 * finding.prevalence_low,
            PERCENT_UNIT,
        ),
        (
            _private_code("CORRECTED_HIGH", "Corrected share of schistocytes, upper limit, 95 %"),
            100 * finding.prevalence_high,
            PERCENT_UNIT,
        ),
    )
    measurement_group = hd.sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=hd.sr.TrackingIdentifier(uid=generate_uid(), identifier="slide"),
        finding_type=SCHISTOCYTE,
        algorithm_id=hd.sr.AlgorithmIdentification(
            name=finding.model, version=finding.software_version, parameters=[f"digest {finding.digest}"]
        ),
        # DICOM has no NaN: leave undefined measurements out
        measurements=[hd.sr.Measurement(n, float(f"{v:.6g}"), unit) for n, v, unit in measurements if math.isfinite(v)],
        source_images=[hd.sr.SourceImageForMeasurementGroup(h.SOPClassUID, h.SOPInstanceUID) for h in headers],
    )
    text_items = (
        (CONCLUSION, finding.verdict),
        (COMMENT, finding.notice),
        *((COMMENT, text) for text in finding.comments),
    )
    for name, text in text_items:
        measurement_group[0].ContentSequence.append(
            hd.sr.TextContentItem(name, text, hd.sr.RelationshipTypeValues.CONTAINS)
        )
    device = hd.sr.ObserverContext(
        observer_type=codes.DCM.Device,
        observer_identifying_attributes=hd.sr.DeviceObserverIdentifyingAttributes(
            uid=generate_uid(entropy_srcs=["hemofed", finding.digest]),
            name="hemofed",
            manufacturer_name="hemofed",
            model_name=finding.model,
        ),
    )
    return hd.sr.MeasurementReport(
        observation_context=hd.sr.ObservationContext(observer_device_context=device),
        procedure_reported=_private_code("SMEAR", "Counting of schistocytes in a blood smear by a trained model"),
        imaging_measurements=[measurement_group],
    )


def _coding_scheme() -> Dataset:
    scheme = Dataset()
    scheme.CodingSchemeDesignator = CODING_SCHEME
    scheme.CodingSchemeName = "Private codes of hemofed"
    scheme.CodingSchemeResponsibleOrganization = "hemofed"
    return scheme


def write_overlay_capture(source: Path, overlay: np.ndarray, output_path: Path, frame_number: int = 1) -> Path:
    """Writes (H, W, 3) uint8 RGB as a Secondary Capture that refers to the frame it was drawn on."""
    shape = overlay.shape
    if len(shape) != 3 or shape[2] != 3 or overlay.dtype != np.uint8 or not 0 < min(shape) <= max(shape) < 2**16:
        raise DataError(f"an overlay of {overlay.dtype} {shape}; give (H, W, 3) uint8 of at most 65535 pixels a side")
    [header] = load_source_headers([source])
    num_frames = int(header.get("NumberOfFrames") or 1)
    if not 1 <= frame_number <= num_frames:
        raise DataError(f"{source} has no frame {frame_number}; give one from 1 to {num_frames}")
    with wrap_source_errors(source):
        data = _encode_dicom(_build_capture(header, overlay, frame_number))
    return write_atomically(output_path, data)


def _build_capture(header: Dataset, overlay: np.ndarray, frame_number: int) -> Dataset:
    now, image = datetime.now(), Dataset()
    for keyword in (*TYPE2_KEYWORDS, "StudyInstanceUID", "StudyDescription", "PatientAge", "BurnedInAnnotation"):
        if keyword in header:
            setattr(image, keyword, header[keyword].value)
    image.SpecificCharacterSet = "ISO_IR 192"
    image.SOPClassUID, image.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    image.SeriesInstanceUID, image.SeriesNumber, image.InstanceNumber = generate_uid(), 1, 1
    image.SeriesDescription, image.Modality = SERIES_DESCRIPTION, header.get("Modality") or "OT"
    image.ConversionType, image.Manufacturer = "WSD", "hemofed"
    image.ImageType = ["DERIVED", "SECONDARY"]
    image.DerivationDescription = OVERLAY_DERIVATION
    image.ContentDate, image.ContentTime = f"{now:%Y%m%d}", f"{now:%H%M%S}"
    image.InstanceCreationDate, image.InstanceCreationTime = image.ContentDate, image.ContentTime
    image.PatientOrientation, image.Laterality = "", ""  # a smear has neither
    image.SourceImageSequence = [_source_reference(header, frame_number)]
    image.Rows, image.Columns, image.SamplesPerPixel = *overlay.shape[:2], 3
    image.PhotometricInterpretation, image.PlanarConfiguration = "RGB", 0
    image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 8, 8, 7, 0
    pixels = overlay.tobytes()
    image.add_new("PixelData", "OB", pixels + b"\0" * (len(pixels) % 2))
    image.file_meta = FileMetaDataset()
    image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    return image


def _source_reference(header: Dataset, frame_number: int) -> Dataset:
    item = Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = header.SOPClassUID, header.SOPInstanceUID
    if int(header.get("NumberOfFrames") or 1) > 1:
        item.ReferencedFrameNumber = frame_number
    item.PurposeOfReferenceCodeSequence = [SOURCE_IMAGE]
    return item


def _encode_dicom(result: Dataset) -> bytes:
    buffer = io.BytesIO()
    pydicom.dcmwrite(buffer, result, enforce_file_format=True)
    return buffer.getvalue()
