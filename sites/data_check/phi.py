"""Personal data (PHI) in file metadata and paths, reported as names of tags and numbers of files, never as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sites.data_check.file_survey import FileSurvey, SurveyedFile
from sites.data_check.findings import Finding, format_count, join_names
from sites.data_check.phi_tags import MetadataTag, TagKind
from sites.data_check.redaction import Redactor

DIRECT_IDENTIFIER: TagKind = "patient"
ASK_OFFICER_HINT = "ask the data protection officer whether the files may be stored here unchanged"
DEIDENTIFY_HINT = "remove these tags (DICOM PS3.15, basic profile, e.g. with the archive's de-identification)"
# the EXIF orientation has to remain, because hemofed applies it
STRIP_METADATA_HINT = (
    "save the images without metadata (e.g. `exiftool -all= -tagsfromfile @ -icc_profile -orientation`)"
)


@dataclass(frozen=True)
class PhiSummary:
    num_dicom: int
    dicom_tags: dict[MetadataTag, int]  # number of DICOM files with the tag
    image_tags: dict[MetadataTag, int]  # number of other image files with the tag
    burned_in_counts: dict[str, int]  # yes, no, unsaid -> number of DICOM files
    num_deidentified: int  # DICOM files that are marked as de-identified
    num_damaged: int
    num_identifying_paths: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "dicom_files": self.num_dicom,
            "dicom_tags": _tag_rows(self.dicom_tags),
            "picture_tags": _tag_rows(self.image_tags),
            "burned_in": self.burned_in_counts,
            "says_de_identified": self.num_deidentified,
            "damaged_dicom": self.num_damaged,
            "paths_that_name_somebody": self.num_identifying_paths,
        }


def build_redactor(survey: FileSurvey) -> Redactor:
    """Redacts every identifier that the metadata of a surveyed file contains."""
    return Redactor.from_identifiers(identifier for file in survey.files for identifier in file.tag_summary.identifiers)


def rank_tags(tags: dict[MetadataTag, int]) -> list[tuple[MetadataTag, int]]:
    """Tags that identify the patient come first; within a kind, the most frequent."""
    return sorted(
        tags.items(), key=lambda item: (item[0].kind != DIRECT_IDENTIFIER, item[0].kind, -item[1], item[0].name)
    )


def summarize_phi(survey: FileSurvey) -> PhiSummary:
    dicom_files = survey.files_of_kind("dicom")
    return PhiSummary(
        num_dicom=len(dicom_files),
        dicom_tags=_count_tags(dicom_files),
        image_tags=_count_tags(survey.files_of_kind("image")),
        burned_in_counts=dict(Counter(file.tag_summary.burned_in for file in dicom_files)),
        num_deidentified=sum(file.tag_summary.is_deidentified for file in dicom_files),
        num_damaged=sum(file.tag_summary.is_damaged for file in dicom_files),
        num_identifying_paths=len(find_identifying_paths(survey)),
    )


def find_identifying_paths(survey: FileSurvey) -> list[str]:
    """Paths that contain a name or ID from metadata. Pseudonyms, in files marked as de-identified, do not count."""
    redactor = Redactor.from_identifiers(
        identifier
        for file in survey.files
        if not file.tag_summary.is_deidentified
        for identifier in file.tag_summary.identifiers
    )
    return [
        file.path for file in survey.files if any(redactor.identifies_person(part) for part in file.path.split("/"))
    ]


def phi_findings(survey: FileSurvey, redactor: Redactor) -> Iterator[Finding]:
    dicom_files = survey.files_of_kind("dicom")

    def redact_paths(files: Sequence[SurveyedFile]) -> tuple[str, ...]:
        return tuple(redactor.redact_path(file.path) for file in files)

    if paths := find_identifying_paths(survey):
        yield Finding(
            "stop",
            "identity",
            f"{format_count(len(paths), 'path contains', 'paths contain')} a personal name or ID from the metadata of a file",
            "rename these files and folders: paths appear in messages and logs",
            tuple(map(redactor.redact_path, paths)),
        )
    if burned_in := [file for file in dicom_files if file.tag_summary.burned_in == "yes"]:
        yield Finding(
            "stop",
            "identity",
            f"{format_count(len(burned_in), 'DICOM file shows', 'DICOM files show')} text or a slide label in the image itself",
            "black out the text, or remove these files: a model would be trained on the text and could memorize it",
            redact_paths(burned_in),
        )
    identifying_patient = [
        file
        for file in dicom_files
        if not file.tag_summary.is_deidentified and any(t.kind == DIRECT_IDENTIFIER for t in file.tag_summary.tags)
    ]
    if identifying_patient:
        yield Finding(
            "look",
            "identity",
            f"{format_count(len(identifying_patient), 'DICOM file identifies', 'DICOM files identify')} the patient: "
            f"{_format_tag_counts(identifying_patient, DIRECT_IDENTIFIER)}",
            f"{DEIDENTIFY_HINT}, or {ASK_OFFICER_HINT}; hemofed itself uses only the pixels",
            redact_paths(identifying_patient),
        )
    other_identifying = [
        file
        for file in dicom_files
        if any(t.kind not in (DIRECT_IDENTIFIER, "unique numbers") for t in file.tag_summary.tags)
    ]
    if other_identifying:
        kinds = sorted(
            {t.kind for file in other_identifying for t in file.tag_summary.tags}
            - {DIRECT_IDENTIFIER, "unique numbers"}
        )
        yield Finding(
            "look",
            "identity",
            f"{format_count(len(other_identifying), 'DICOM file has', 'DICOM files have')} other tags that may identify a person: "
            f"{', '.join(kinds)}",
            f"{DEIDENTIFY_HINT}, or {ASK_OFFICER_HINT}",
            redact_paths(other_identifying),
        )
    if not_stated := [file for file in dicom_files if file.tag_summary.burned_in == "unsaid"]:
        yield Finding(
            "look",
            "identity",
            f"{format_count(len(not_stated), 'DICOM file does', 'DICOM files do')} not state whether the image shows text "
            "(BurnedInAnnotation)",
            "look at these images, and black out any text",
            redact_paths(not_stated),
        )
    if unreadable := [file for file in dicom_files if file.tag_summary.is_damaged]:
        yield Finding(
            "look",
            "identity",
            f"the tags of {format_count(len(unreadable), 'DICOM file')} cannot be read",
            "export these files again",
            redact_paths(unreadable),
        )
    if survey.num_unread_dicom:
        yield Finding(
            "look",
            "identity",
            f"{format_count(survey.num_unread_dicom, 'DICOM file was', 'DICOM files were')} not checked for personal data, because "
            "pydicom is not installed",
            "install it with pip install 'hemofed[hospital]', and run the check again",
        )
    if tagged_images := [file for file in survey.files_of_kind("image") if file.tag_summary.tags]:
        names = join_names(sorted({t.name for file in tagged_images for t in file.tag_summary.tags}), 12)
        yield Finding(
            "look",
            "identity",
            f"{format_count(len(tagged_images), 'image has', 'images have')} metadata that may identify a person: {names}",
            f"{STRIP_METADATA_HINT}, or {ASK_OFFICER_HINT}; hemofed itself uses only the pixels",
            redact_paths(tagged_images),
        )


def _count_tags(files: Sequence[SurveyedFile]) -> dict[MetadataTag, int]:
    return dict(Counter(tag for file in files for tag in file.tag_summary.tags))


def _tag_rows(tags: dict[MetadataTag, int]) -> list[dict[str, Any]]:
    return [{"tag": tag.name, "kind": tag.kind, "files": num_files} for tag, num_files in rank_tags(tags)]


def _format_tag_counts(files: Sequence[SurveyedFile], kind: TagKind) -> str:
    counts = Counter(tag.name for file in files for tag in file.tag_summary.tags if tag.kind == kind)
    return join_names(
        [f"{name} ({counts[name]:,})" for name in sorted(counts, key=lambda name: (-counts[name], name))], 12
    )
