"""The instances a result refers to: their headers without pixels, of one patient, with what anonymised files lack filled in."""

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

from deploy.imaging.images import FILTERS
from pipeline.core.errors import BadData, HemofedError

# Types 2 of the patient and study modules: anonymised files lack them, and an empty value says "unknown".
UNKNOWN = (
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex",
    "StudyID", "StudyDate", "StudyTime", "AccessionNumber", "ReferringPhysicianName",
)  # fmt: skip


def source_headers(sources: Sequence[Path]) -> list[Dataset]:
    """Without pixels; each instance once, of one patient, with what results need filled in."""
    if not sources:
        raise BadData("no DICOM source to refer to; results go into DICOM only when the pictures came from it")
    found: dict[str, Dataset] = {}
    for source in sources:
        header = _header(source)
        found.setdefault(header.SOPInstanceUID, header)
    headers = list(found.values())
    _one_patient(headers)
    # Made from the first instance, so that a report and its pictures meet in one study.
    study = _uid(headers[0], "StudyInstanceUID") or generate_uid(entropy_srcs=["study", headers[0].SOPInstanceUID])
    for header in headers:
        series = generate_uid(entropy_srcs=["series", header.SOPInstanceUID])
        header.StudyInstanceUID = _uid(header, "StudyInstanceUID") or study
        header.SeriesInstanceUID = _uid(header, "SeriesInstanceUID") or series
    return headers


def one_slide(sources: Sequence[Path]) -> list[str]:
    """What speaks against DICOM files being of one slide, in words; those of several patients are refused."""
    headers = []
    for source in sources:
        with refusing(source):
            headers.append(pydicom.dcmread(source, stop_before_pixels=True, force=True))

    _one_patient(headers)
    if any(
        len({str(h.get(keyword) or "") for h in headers}) > 1 for keyword in ("StudyInstanceUID", "AccessionNumber")
    ):
        return ["the DICOM files are of several studies or accessions: give those of one slide at a time"]
    return []


def _one_patient(headers: Sequence[Dataset]) -> None:
    if len({str(h.get("PatientID") or "") or f"name {h.get('PatientName') or ''}" for h in headers}) > 1:
        raise BadData("the DICOM files belong to several patients; give those of one slide at a time")


def _uid(header: Dataset, keyword: str) -> str:
    """Empty if there is none, or none that other software would take."""
    found = UID(str(header.get(keyword) or ""))
    return found if found.is_valid else ""


def _header(source: Path) -> Dataset:
    with refusing(source):
        header = pydicom.dcmread(source, stop_before_pixels=True, force=True)
        header.decode()
        header.SpecificCharacterSet = "ISO_IR 192"  # results are written so; their own texts need it
        if not _uid(header, "SOPInstanceUID") or not _uid(header, "SOPClassUID"):
            raise BadData(f"{source}: has no SOP Instance UID or SOP Class UID to refer to; export it again with UIDs")
        for keyword in UNKNOWN:
            setattr(header, keyword, _plain(header, keyword))
    return header


@contextmanager
def refusing(source: Path) -> Iterator[None]:
    """What pydicom and highdicom make of a source's values is worth no traceback, and their warnings no output."""
    with FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except HemofedError:
            raise
        except Exception as error:
            raise BadData(f"{source}: a result cannot refer to it ({error}); export it again") from error


def _plain(header: Dataset, keyword: str) -> Any:
    """Empty instead of what a reader would stumble over: dates such as 19XX, a sex other than M, F and O."""
    value = header.get(keyword)
    if value is None or (keyword == "PatientSex" and value not in ("M", "F", "O")):
        return ""
    shape = {"DA": r"\d{8}", "TM": r"\d{2,6}(\.\d{1,6})?"}.get(header[keyword].VR)
    return value if shape is None or re.fullmatch(shape, str(value)) else ""
