"""Headers (without pixels) of the DICOM instances that a result refers to; fills in what anonymized files lack."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pydicom
from pydicom.dataset import Dataset
from pydicom.uid import UID, generate_uid

from deploy.imaging.dicom_reader import read_identity
from deploy.imaging.input_image import WARNINGS_LOCK
from deploy.slide.session import SEVERAL_PATIENTS
from pipeline.core.errors import DataError, HemofedError

# Type 2 attributes of the patient and study modules: anonymized files lack them; an empty value means "unknown".
TYPE2_KEYWORDS = (
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex",
    "StudyID", "StudyDate", "StudyTime", "AccessionNumber", "ReferringPhysicianName",
)  # fmt: skip


def load_source_headers(sources: Sequence[Path]) -> list[Dataset]:
    """Each instance once; all must belong to one patient. Missing UIDs are derived from the SOP Instance UID."""
    if not sources:
        raise DataError("no DICOM source to refer to; DICOM results need DICOM images as input")
    headers_by_uid: dict[str, Dataset] = {}
    for source in sources:
        header = _load_header(source)
        headers_by_uid.setdefault(header.SOPInstanceUID, header)
    headers = list(headers_by_uid.values())
    _require_one_patient(headers)
    # Derived from the first instance, so that a report and its overlays share one study.
    study_uid = _read_uid(headers[0], "StudyInstanceUID") or generate_uid(
        entropy_srcs=["study", headers[0].SOPInstanceUID]
    )
    for header in headers:
        series_uid = generate_uid(entropy_srcs=["series", header.SOPInstanceUID])
        header.StudyInstanceUID = _read_uid(header, "StudyInstanceUID") or study_uid
        header.SeriesInstanceUID = _read_uid(header, "SeriesInstanceUID") or series_uid
    return headers


def _require_one_patient(headers: Sequence[Dataset]) -> None:
    if len({read_identity(header).patient for header in headers}) > 1:
        raise DataError(SEVERAL_PATIENTS)


def _read_uid(header: Dataset, keyword: str) -> str:
    """Empty if missing or invalid."""
    value = UID(str(header.get(keyword) or ""))
    return value if value.is_valid else ""


def _load_header(source: Path) -> Dataset:
    with wrap_source_errors(source):
        header = pydicom.dcmread(source, stop_before_pixels=True, force=True)
        header.decode()
        header.SpecificCharacterSet = "ISO_IR 192"  # UTF-8, as results are written
        if not _read_uid(header, "SOPInstanceUID") or not _read_uid(header, "SOPClassUID"):
            raise DataError(
                f"{source}: has no SOP Instance UID or SOP Class UID to refer to; export it again with UIDs"
            )
        for keyword in TYPE2_KEYWORDS:
            setattr(header, keyword, _valid_value(header, keyword))
    return header


@contextmanager
def wrap_source_errors(source: Path) -> Iterator[None]:
    """Turns errors of pydicom and highdicom about a source into `DataError`, and silences their warnings."""
    with WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except HemofedError:
            raise
        except Exception as error:
            raise DataError(f"{source}: a result cannot refer to it ({error}); export it again") from error


def _valid_value(header: Dataset, keyword: str) -> Any:
    """Empty instead of invalid values: dates such as 19XX, a sex other than M, F and O."""
    value = header.get(keyword)
    if value is None or (keyword == "PatientSex" and value not in ("M", "F", "O")):
        return ""
    pattern = {"DA": r"\d{8}", "TM": r"\d{2,6}(\.\d{1,6})?"}.get(header[keyword].VR)
    return value if pattern is None or re.fullmatch(pattern, str(value)) else ""
