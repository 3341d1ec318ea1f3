"""Results as DICOM: a structured report (TID 1500) and overlays as secondary captures, both referring to their sources.

Patient and study are copied, so that an archive files the result with the images; the source's pixels are not copied.
Where no standard code fits exactly, the code comes from our private scheme 99HEMOFED.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import highdicom as hd
import numpy as np
import pydicom
from highdicom.sr import CodedConcept
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sr.codedict import codes
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.imaging.dicom_reader import OVERLAY_DERIVATION
from deploy.inference.runtime import ModelInfo
from deploy.slide.dicom_sources import TYPE2_KEYWORDS, load_source_headers, wrap_source_errors
from deploy.slide.slide_result import SlideResult
from deploy.slide.slide_text import build_rows, format_headline
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


def _private_code(value: str, meaning: str) -> CodedConcept:
    return CodedConcept(value, CODING_SCHEME, meaning)


def write_structured_report(sources: Sequence[Path], slide: SlideResult, model: ModelInfo, output_path: Path) -> Path:
    """Writes one Comprehensive SR that refers to all `sources`; they must belong to one patient."""
    headers = load_source_headers(sources)
    with wrap_source_errors(sources[0]):
        report = hd.sr.ComprehensiveSR(
            evidence=headers,
            content=_build_content(headers, slide, model)[0],
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


def _build_content(headers: Sequence[Dataset], slide: SlideResult, model: ModelInfo) -> hd.sr.MeasurementReport:
    measurement_group = hd.sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=hd.sr.TrackingIdentifier(uid=generate_uid(), identifier="slide"),
        finding_type=SCHISTOCYTE,
        algorithm_id=hd.sr.AlgorithmIdentification(
            name=model.title, version=version("hemofed"), parameters=[f"digest {model.digest}"]
        ),
        measurements=list(_iter_measurements(slide)),
        source_images=[hd.sr.SourceImageForMeasurementGroup(h.SOPClassUID, h.SOPInstanceUID) for h in headers],
    )
    rows = (f"{label}: {value}" for label, value in build_rows(slide, model))
    comments = (RESEARCH_USE_NOTICE, *slide.reliability_warnings, *slide.notes, *rows)
    for name, text in ((CONCLUSION, format_headline(slide)), *((COMMENT, comment) for comment in comments)):
        measurement_group[0].ContentSequence.append(
            hd.sr.TextContentItem(name, text, hd.sr.RelationshipTypeValues.CONTAINS)
        )
    device = hd.sr.ObserverContext(
        observer_type=codes.DCM.Device,
        observer_identifying_attributes=hd.sr.DeviceObserverIdentifyingAttributes(
            uid=generate_uid(entropy_srcs=["hemofed", model.digest]),
            name="hemofed",
            manufacturer_name="hemofed",
            model_name=model.title,
        ),
    )
    return hd.sr.MeasurementReport(
        observation_context=hd.sr.ObservationContext(observer_device_context=device),
        procedure_reported=_private_code("SMEAR", "Counting of schistocytes in a blood smear by a trained model"),
        imaging_measurements=[measurement_group],
    )


def _iter_measurements(slide: SlideResult) -> Iterator[hd.sr.Measurement]:
    """Numbers that are unknown are left out, because DICOM has no NaN."""
    counts, estimate = slide.counts, slide.estimate
    for name, number, unit in (
        (_private_code("CELLS", "Red blood cells examined"), counts.num_counted, CELLS_UNIT),
        (_private_code("CALLED", "Cells called schistocyte"), counts.num_flagged, CELLS_UNIT),
    ):
        yield hd.sr.Measurement(name, float(f"{number:.6g}"), unit)
    for code, meaning, fraction in (  # meanings have at most 64 letters
        ("SHARE_CALLED", "Share of cells called schistocyte", counts.flagged_fraction),
        ("CORRECTED", "Share of schistocytes, corrected for the model's errors", estimate.prevalence),
        ("CORRECTED_LOW", "Corrected share of schistocytes, lower limit, 95 %", estimate.prevalence_low),
        ("CORRECTED_HIGH", "Corrected share of schistocytes, upper limit, 95 %", estimate.prevalence_high),
    ):
        if fraction is not None:
            yield hd.sr.Measurement(_private_code(code, meaning), float(f"{100 * fraction:.6g}"), PERCENT_UNIT)


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
