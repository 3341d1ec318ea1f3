"""What was found, back into DICOM: a structured report (TID 1500) and a picture with marks, both pointing at their sources.

Patient and study are copied, so an archive files the result beside the images; pixels of the source never are.
Where no standard code is known to fit, the scheme is 99HEMOFED, our own, rather than a standard code that nearly does.
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

from deploy.imaging.dicom_reader import MARKED
from deploy.slide.dicom_sources import UNKNOWN, refusing, source_headers
from pipeline.core.errors import BadData
from pipeline.core.files import write_atomically

SCHEME = "99HEMOFED"
SERIES = "AI result, research use only"

# SNOMED CT displays 70310009 as "Schistocyte"; the DCM ones are of DICOM PS3.16.
SCHISTOCYTE = CodedConcept("70310009", "SCT", "Schistocyte")
COMMENT = CodedConcept("121106", "DCM", "Comment")
CONCLUSION = CodedConcept("121077", "DCM", "Conclusion")
SOURCE_IMAGE = CodedConcept("121322", "DCM", "Source image for image processing operation")
CELLS = CodedConcept("{cells}", "UCUM", "cells")
PERCENT = CodedConcept("%", "UCUM", "percent")


@dataclass(frozen=True)
class Finding:
    """What the report says about one slide; all numbers come from our slide report."""

    cells: int
    schistocytes: int  # called so
    prevalence: float  # corrected
    low: float
    high: float  # shares 0..1
    verdict: str  # e.g. "cannot decide"
    model: str
    digest: str
    version: str  # which bundle said so
    notice: str  # "research use only, not a medical device"
    comments: tuple[str, ...] = ()  # warnings, operating point, what was not counted

    @property
    def called(self) -> float:
        return self.schistocytes / self.cells if self.cells else math.nan


def _ours(value: str, meaning: str) -> CodedConcept:
    return CodedConcept(value, SCHEME, meaning)


def structured_report(sources: Sequence[Path], finding: Finding, out: Path) -> Path:
    """One Comprehensive SR that refers to all `sources`, which have to be of one patient."""
    headers = source_headers(sources)
    with refusing(sources[0]):
        report = hd.sr.ComprehensiveSR(
            evidence=headers,
            content=_content(headers, finding)[0],
            series_instance_uid=generate_uid(),
            series_number=1,
            sop_instance_uid=generate_uid(),
            instance_number=1,
            manufacturer="hemofed",
            is_complete=True,
            is_final=False,  # preliminary and unverified: no person has signed it
            transfer_syntax_uid=ExplicitVRLittleEndian,
        )
        report.SeriesDescription = SERIES
        report.CodingSchemeIdentificationSequence = [_scheme()]
        data = _bytes(report)
    return write_atomically(out, data)


def _content(headers: Sequence[Dataset], finding: Finding) -> hd.sr.MeasurementReport:
    numbers = (
        (_ours("CELLS", "Red blood cells examined"), finding.cells, CELLS),
        (_ours("CALLED", "Cells called schistocyte"), finding.schistocytes, CELLS),
        (_ours("SHARE_CALLED", "Share of cells called schistocyte"), 100 * finding.called, PERCENT),
        # meanings have at most 64 letters
        (
            _ours("CORRECTED", "Share of schistocytes, corrected for the model's errors"),
            100 * finding.prevalence,
            PERCENT,
        ),
        (_ours("CORRECTED_LOW", "Corrected share of schistocytes, lower limit, 95 %"), 100 * finding.low, PERCENT),
        (_ours("CORRECTED_HIGH", "Corrected share of schistocytes, upper limit, 95 %"), 100 * finding.high, PERCENT),
    )
    group = hd.sr.MeasurementsAndQualitativeEvaluations(
        tracking_identifier=hd.sr.TrackingIdentifier(uid=generate_uid(), identifier="slide"),
        finding_type=SCHISTOCYTE,
        algorithm_id=hd.sr.AlgorithmIdentification(
            name=finding.model, version=finding.version, parameters=[f"digest {finding.digest}"]
        ),
        # of no cells there is no share, and DICOM has no number for it
        measurements=[hd.sr.Measurement(n, float(f"{v:.6g}"), unit) for n, v, unit in numbers if math.isfinite(v)],
        source_images=[hd.sr.SourceImageForMeasurementGroup(h.SOPClassUID, h.SOPInstanceUID) for h in headers],
    )
    told = ((CONCLUSION, finding.verdict), (COMMENT, finding.notice), *((COMMENT, text) for text in finding.comments))
    for name, text in told:
        group[0].ContentSequence.append(hd.sr.TextContentItem(name, text, hd.sr.RelationshipTypeValues.CONTAINS))
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
        procedure_reported=_ours("SMEAR", "Counting of schistocytes in a blood smear by a trained model"),
        imaging_measurements=[group],
    )


def _scheme() -> Dataset:
    scheme = Dataset()
    scheme.CodingSchemeDesignator = SCHEME
    scheme.CodingSchemeName = "Private codes of hemofed"
    scheme.CodingSchemeResponsibleOrganization = "hemofed"
    return scheme


def overlay_capture(source: Path, overlay: np.ndarray, out: Path, frame: int = 1) -> Path:
    """(H, W, 3) uint8 RGB as a Secondary Capture that refers to the frame it was drawn on."""
    shape = overlay.shape
    if len(shape) != 3 or shape[2] != 3 or overlay.dtype != np.uint8 or not 0 < min(shape) <= max(shape) < 2**16:
        raise BadData(f"an overlay of {overlay.dtype} {shape}; give (H, W, 3) uint8 of at most 65535 pixels a side")
    [header] = source_headers([source])
    frames = int(header.get("NumberOfFrames") or 1)
    if not 1 <= frame <= frames:
        raise BadData(f"{source} has no frame {frame}; give one from 1 to {frames}")
    with refusing(source):
        data = _bytes(_capture(header, overlay, frame))
    return write_atomically(out, data)


def _capture(header: Dataset, overlay: np.ndarray, frame: int) -> Dataset:
    now, image = datetime.now(), Dataset()
    for keyword in (*UNKNOWN, "StudyInstanceUID", "StudyDescription", "PatientAge", "BurnedInAnnotation"):
        if keyword in header:
            setattr(image, keyword, header[keyword].value)
    image.SpecificCharacterSet = "ISO_IR 192"
    image.SOPClassUID, image.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    image.SeriesInstanceUID, image.SeriesNumber, image.InstanceNumber = generate_uid(), 1, 1
    image.SeriesDescription, image.Modality = SERIES, header.get("Modality") or "OT"
    image.ConversionType, image.Manufacturer = "WSD", "hemofed"
    image.ImageType = ["DERIVED", "SECONDARY"]
    image.DerivationDescription = MARKED
    image.ContentDate, image.ContentTime = f"{now:%Y%m%d}", f"{now:%H%M%S}"
    image.InstanceCreationDate, image.InstanceCreationTime = image.ContentDate, image.ContentTime
    image.PatientOrientation, image.Laterality = "", ""  # a smear has neither
    image.SourceImageSequence = [_reference(header, frame)]
    image.Rows, image.Columns, image.SamplesPerPixel = *overlay.shape[:2], 3
    image.PhotometricInterpretation, image.PlanarConfiguration = "RGB", 0
    image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 8, 8, 7, 0
    pixels = overlay.tobytes()
    image.add_new("PixelData", "OB", pixels + b"\0" * (len(pixels) % 2))
    image.file_meta = FileMetaDataset()
    image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    return image


def _reference(header: Dataset, frame: int) -> Dataset:
    item = Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = header.SOPClassUID, header.SOPInstanceUID
    if int(header.get("NumberOfFrames") or 1) > 1:
        item.ReferencedFrameNumber = frame
    item.PurposeOfReferenceCodeSequence = [SOURCE_IMAGE]
    return item


def _bytes(result: Dataset) -> bytes:
    buffer = io.BytesIO()
    pydicom.dcmwrite(buffer, result, enforce_file_format=True)
    return buffer.getvalue()
