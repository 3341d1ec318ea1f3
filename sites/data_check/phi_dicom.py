"""Identifying attributes in a DICOM file, by the basic profile of PS3.15 (table E.1-1): names, never values.

The profile's list is long and grows. Person names, dates, free text and instance UIDs are recognized by their value
representation, so that attributes that are not listed here are found too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sites.data_check.phi_tags import MetadataTag, TagKind, TagSummary

if TYPE_CHECKING:
    from pydicom.dataelem import DataElement
    from pydicom.dataset import Dataset

PREAMBLE_BYTES = 128
DICOM_MAGIC = b"DICM"
NO_PREAMBLE_STARTS = (b"\x08\x00", b"\x02\x00")  # group 0008 or 0002: a file without preamble

IDENTIFYING_ATTRIBUTES: dict[TagKind, str] = {
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
KEYWORDS_BY_KIND = {kind: frozenset(names.split()) for kind, names in IDENTIFYING_ATTRIBUTES.items()}
KIND_BY_VR: dict[str, TagKind] = {
    "PN": "people and places", "DA": "dates", "DT": "dates", "TM": "dates", "LT": "free text", "ST": "free text", "UT": "free text",
}  # fmt: skip
KIND_BY_KEYWORD: dict[str, TagKind] = {name: kind for kind, names in KEYWORDS_BY_KIND.items() for name in names}
INSTANCE_UID_KEYWORDS = frozenset(
    {"FrameOfReferenceUID", "SynchronizationFrameOfReferenceUID", "SpecimenUID", "DeviceUID", "UID"}
)
LABEL_IMAGE_TYPES = frozenset({"LABEL", "OVERVIEW", "MACRO"})  # of a scanned slide: the image shows its paper label
# often just 1, so they are not searched for in paths
NON_IDENTIFYING_KEYWORDS = frozenset(
    {"StudyID", "PatientBirthTime", "ScheduledProcedureStepID", "PerformedProcedureStepID"}
)


def is_dicom(header: bytes) -> bool:
    """By the first 132 bytes. A file without preamble can be DICOM too: see `may_lack_preamble`."""
    return header[PREAMBLE_BYTES : PREAMBLE_BYTES + len(DICOM_MAGIC)] == DICOM_MAGIC


def may_lack_preamble(header: bytes) -> bool:
    """If True, only reading the file shows whether it is DICOM."""
    return header[:2] in NO_PREAMBLE_STARTS


def read_dicom_tags(file: Path, without_preamble: bool = False) -> TagSummary | None:
    """None if the file is not DICOM. Errors and warnings of pydicom quote values, so they must not be shown: errors end
    here, and the caller ignores warnings (filters are global, and it may use threads)."""
    import pydicom

    try:
        dataset = pydicom.dcmread(file, stop_before_pixels=True, force=without_preamble)
        return None if without_preamble and "SOPClassUID" not in dataset else _summarize_tags(dataset)
    except Exception:  # a damaged file can raise anything inside pydicom
        return None if without_preamble else TagSummary(is_damaged=True, burned_in="unsaid")


def _summarize_tags(dataset: Dataset) -> TagSummary:
    elements = [element for element in dataset.iterall() if not _is_empty(element)]
    tags = {tag for element in elements if (tag := _classify_element(element)) is not None}
    identifiers = {str(part) for element in elements if _is_identifier(element) for part in _element_values(element)}
    is_deidentified = str(dataset.get("PatientIdentityRemoved", "")).upper() == "YES"
    # pydicom also reads files that are not DICOM
    is_damaged = "SOPClassUID" not in dataset and "DirectoryRecordSequence" not in dataset
    return TagSummary(
        frozenset(tags), _burned_in_annotation(dataset), is_deidentified, is_damaged, frozenset(identifiers)
    )


def _classify_element(element: DataElement) -> MetadataTag | None:
    if element.tag.is_private:
        return MetadataTag("private", "private tags")
    if 0x6000 <= element.tag.group <= 0x60FF:
        return MetadataTag("pixels", "OverlayData") if element.keyword == "OverlayData" else None
    kind = KIND_BY_KEYWORD.get(element.keyword) or KIND_BY_VR.get(element.VR)
    if (
        kind is None
        and element.VR == "UI"
        and (element.keyword.endswith("InstanceUID") or element.keyword in INSTANCE_UID_KEYWORDS)
    ):
        kind = "unique numbers"
    return None if kind is None else MetadataTag(kind, element.keyword or "unlisted tags")


def _is_identifier(element: DataElement) -> bool:
    is_listed = element.keyword in KEYWORDS_BY_KIND["patient"] and element.keyword not in NON_IDENTIFYING_KEYWORDS
    return is_listed or (element.VR == "PN" and not element.tag.is_private)


def _element_values(element: DataElement) -> list[Any]:
    return list(element.value) if element.VM > 1 else [element.value]


def _is_empty(element: DataElement) -> bool:
    return element.VR == "SQ" or element.value is None or not str(element.value).strip()


def _burned_in_annotation(dataset: Dataset) -> Literal["yes", "no", "unsaid"]:
    image_types = {str(image_type).upper() for image_type in (dataset.get("ImageType") or [])}
    if image_types & LABEL_IMAGE_TYPES or "YES" in (
        _upper_value(dataset, "BurnedInAnnotation"),
        _upper_value(dataset, "SpecimenLabelInImage"),
    ):
        return "yes"
    return "no" if _upper_value(dataset, "BurnedInAnnotation") == "NO" else "unsaid"


def _upper_value(dataset: Dataset, keyword: str) -> str:
    return str(dataset.get(keyword, "")).strip().upper()
