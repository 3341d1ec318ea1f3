"""Identifying attributes of a DICOM file, after the basic profile of PS3.15 (table E.1-1): which are there, never what they say.

The profile's list is long and grows; person names, dates, free text and instance UIDs are known by their value
representation, so that also attributes that are not listed here are found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sites.data_check.phi_tags import Kind, Tag, Told

if TYPE_CHECKING:
    from pydicom.dataelem import DataElement
    from pydicom.dataset import Dataset

PREAMBLE = 128
MAGIC = b"DICM"
BARE = (b"\x08\x00", b"\x02\x00")  # group 0008 or 0002 first: a file without its preamble

ATTRIBUTES: dict[Kind, str] = {
    "patient": (
        "PatientName PatientID PatientBirthName PatientBirthDate PatientBirthTime PatientMotherBirthName OtherPatientNames "
        "OtherPatientIDs PatientAddress PatientTelephoneNumbers PatientTelecomInformation MedicalRecordLocator "
        "IssuerOfPatientID ResponsiblePerson ResponsibleOrganization AccessionNumber AdmissionID StudyID ServiceEpisodeID "
        "RequestedProcedureID ScheduledProcedureStepID PerformedProcedureStepID FillerOrderNumberImagingServiceRequest "
        "PlacerOrderNumberImagingServiceRequest ContainerIdentifier SpecimenIdentifier SpecimenAccessionNumber "
        "BarcodeValue LabelText"
    ),
    "people and places": (
        "InstitutionName InstitutionAddress InstitutionalDepartmentName StationName DeviceSerialNumber PlateID "
        "DetectorID CassetteID GantryID GeneratorID CurrentPatientLocation PatientInstitutionResidence "
        "CountryOfResidence RegionOfResidence PerformedStationName PerformedLocation ScheduledStationName "
        "ReferringPhysicianAddress ReferringPhysicianTelephoneNumbers RequestingService"
    ),
    "traits": (
        "PatientAge PatientSex PatientSize PatientWeight PatientSexNeutered EthnicGroup Occupation SmokingStatus "
        "PregnancyStatus PatientReligiousPreference MilitaryRank BranchOfService PatientState MedicalAlerts "
        "Allergies PatientSpeciesDescription PatientBreedDescription"
    ),
    "free text": (
        "StudyDescription SeriesDescription ProtocolName RequestedProcedureDescription PerformedProcedureStepDescription "
        "AdmittingDiagnosesDescription DerivationDescription ImageComments PatientComments AdditionalPatientHistory "
        "ReasonForStudy RequestedProcedureComments ContentCreatorName TextValue UnformattedTextValue "
        "SpecimenShortDescription SpecimenDetailedDescription"
    ),
}
LISTED = {kind: frozenset(names.split()) for kind, names in ATTRIBUTES.items()}
BY_REPRESENTATION: dict[str, Kind] = {
    "PN": "people and places", "DA": "dates", "DT": "dates", "TM": "dates", "LT": "free text", "ST": "free text", "UT": "free text",
}  # fmt: skip
BY_NAME: dict[str, Kind] = {name: kind for kind, names in LISTED.items() for name in names}
INSTANCES = frozenset({"FrameOfReferenceUID", "SynchronizationFrameOfReferenceUID", "SpecimenUID", "DeviceUID", "UID"})
LABELS = frozenset({"LABEL", "OVERVIEW", "MACRO"})  # of a scanned slide: its paper label is in the picture
NO_SECRET = frozenset(
    {"StudyID", "PatientBirthTime", "ScheduledProcedureStepID", "PerformedProcedureStepID"}
)  # often just 1


def is_dicom(head: bytes) -> bool:
    """By the first 132 bytes; without preamble it may be one, which only reading tells."""
    return head[PREAMBLE : PREAMBLE + len(MAGIC)] == MAGIC


def may_be_bare(head: bytes) -> bool:
    return head[:2] in BARE


def read_tags(file: Path, bare: bool = False) -> Told | None:
    """None if it is no DICOM after all. What pydicom says is for nobody, since it quotes values: the caller, who may have
    threads, ignores its warnings, and its errors end here."""
    import pydicom

    try:
        found = pydicom.dcmread(file, stop_before_pixels=True, force=bare)
        return None if bare and "SOPClassUID" not in found else _told(found)
    except Exception:  # a damaged file can raise anything inside pydicom
        return None if bare else Told(damaged=True, burned_in="unsaid")


def _told(found: Dataset) -> Told:
    elements = [element for element in found.iterall() if not _is_empty(element)]
    tags = {tag for element in elements if (tag := _tag(element)) is not None}
    secrets = {str(part) for element in elements if _is_secret(element) for part in _values(element)}
    cleaned = str(found.get("PatientIdentityRemoved", "")).upper() == "YES"
    damaged = "SOPClassUID" not in found and "DirectoryRecordSequence" not in found  # pydicom reads on through rubbish
    return Told(frozenset(tags), _burned_in(found), cleaned, damaged, frozenset(secrets))


def _tag(element: DataElement) -> Tag | None:
    if element.tag.is_private:
        return Tag("private", "private tags")
    if 0x6000 <= element.tag.group <= 0x60FF:
        return Tag("pixels", "OverlayData") if element.keyword == "OverlayData" else None
    kind = BY_NAME.get(element.keyword) or BY_REPRESENTATION.get(element.VR)
    if (
        kind is None
        and element.VR == "UI"
        and (element.keyword.endswith("InstanceUID") or element.keyword in INSTANCES)
    ):
        kind = "unique numbers"
    return None if kind is None else Tag(kind, element.keyword or "unlisted tags")


def _is_secret(element: DataElement) -> bool:
    listed = element.keyword in LISTED["patient"] and element.keyword not in NO_SECRET
    return listed or (element.VR == "PN" and not element.tag.is_private)


def _values(element: DataElement) -> list[Any]:
    return list(element.value) if element.VM > 1 else [element.value]


def _is_empty(element: DataElement) -> bool:
    return element.VR == "SQ" or element.value is None or not str(element.value).strip()


def _burned_in(found: Dataset) -> Literal["yes", "no", "unsaid"]:
    kinds = {str(kind).upper() for kind in (found.get("ImageType") or [])}
    if kinds & LABELS or "YES" in (_upper(found, "BurnedInAnnotation"), _upper(found, "SpecimenLabelInImage")):
        return "yes"
    return "no" if _upper(found, "BurnedInAnnotation") == "NO" else "unsaid"


def _upper(found: Dataset, keyword: str) -> str:
    return str(found.get(keyword, "")).strip().upper()
