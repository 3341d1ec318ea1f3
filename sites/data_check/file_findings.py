"""Findings on the files of a site's folder: whether a study can read them, and which it would skip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sites.data.base import DataSource
from sites.data.folder import ImageFolder
from sites.data.images import IMAGE_FORMATS, IMAGE_SUFFIXES
from sites.data_check.examples import NamedExamples
from sites.data_check.file_survey import FileSurvey
from sites.data_check.findings import Finding, format_count, join_names
from sites.data_check.redaction import Redactor


def count_files(survey: FileSurvey) -> dict[str, int]:
    kinds = Counter(file.kind for file in survey.files)
    return {
        "files": len(survey.files),
        "images": kinds["image"],
        "dicom": kinds["dicom"],
        "other": kinds["other"],
        "unreadable": kinds["unreadable"],
        "hidden": survey.num_hidden,
        "links_out": len(survey.outside_links),
    }


def survey_findings(
    survey: FileSurvey, examples: NamedExamples | None, redactor: Redactor, source: DataSource
) -> Iterator[Finding]:
    def redact_paths(files: list[str]) -> tuple[str, ...]:
        return tuple(map(redactor.redact_path, files))

    if survey.unreadable_folders:
        yield Finding(
            "stop",
            "files",
            f"{format_count(len(survey.unreadable_folders), 'folder')} cannot be opened",
            "give the agent's user permission to read these folders",
            redact_paths(list(survey.unreadable_folders)),
        )
    if survey.outside_links:
        yield Finding(
            "look",
            "files",
            f"{format_count(len(survey.outside_links), 'link leads', 'links lead')} out of the data folder or to a missing "
            "file, and hemofed does not follow such links",
            "copy the target of each link into the data folder, or delete the link",
            redact_paths(list(survey.outside_links)),
        )
    reported_paths = set() if examples is None else {line.partition(": ")[0] for line in examples.dataset.skipped}
    if unreadable := [file for file in survey.files_of_kind("unreadable") if file.path not in reported_paths]:
        reasons = Counter(file.reason for file in unreadable)
        reasons_text = join_names(
            [f"{redactor.redact_text(reason)} ({number:,})" for reason, number in reasons.most_common()]
        )
        yield Finding(
            "look",
            "files",
            f"{format_count(len(unreadable), 'file')} cannot be read: {reasons_text}",
            "repair or remove these files",
            redact_paths([file.path for file in unreadable]),
        )
    if misnamed := [file.path for file in survey.files if file.is_misnamed]:
        yield Finding(
            "fine",
            "files",
            f"{format_count(len(misnamed), 'image has', 'images have')} a suffix that does not match the content, e.g. a PNG "
            "named .jpg",
            "no action needed: the format is recognized by the content",
            redact_paths(misnamed),
        )
    if paths_16_bit := [file.path for file in survey.files if file.is_16_bit]:
        yield Finding(
            "fine",
            "files",
            f"{format_count(len(paths_16_bit), 'image has', 'images have')} 16 bits per pixel",
            "no action needed: values are scaled by the full range of 16 bits, never stretched to an image's own range",
            redact_paths(paths_16_bit),
        )
    if isinstance(source, ImageFolder) and (
        skipped_paths := [s.path for s in survey.files_of_kind("image") if s.suffix not in IMAGE_SUFFIXES]
    ):
        yield Finding(
            "look",
            "files",
            f"a study would skip {format_count(len(skipped_paths), 'image')} because of the suffix",
            f"rename the files to one of the suffixes {', '.join(sorted(IMAGE_SUFFIXES))}",
            redact_paths(skipped_paths),
        )
    if isinstance(source, ImageFolder) and (dicom_files := survey.files_of_kind("dicom")):
        yield Finding(
            "look",
            "files",
            f"a study would skip {format_count(len(dicom_files), 'DICOM file')}: only "
            f"{', '.join(IMAGE_FORMATS)} are read from a folder",
            "export these files as PNG or TIFF if a study should use them",
            redact_paths([file.path for file in dicom_files]),
        )


def reading_findings(
    source: DataSource, examples: NamedExamples | None, read_error: str, redactor: Redactor, survey: FileSurvey | None
) -> Iterator[Finding]:
    if survey is not None and not survey.files:
        yield Finding(
            "stop", "files", "the data folder contains no files", "correct `data` in site.toml, or the option --data"
        )
        return
    if read_error:
        message, _, details = redactor.redact_text(read_error).partition("\n")
        yield Finding(
            "stop",
            "files",
            f"a study cannot read the data: {message}",
            "correct this, and run the check again",
            tuple(line.strip() for line in details.splitlines()),
        )
    skipped = examples.dataset.skipped if examples is not None and isinstance(source, ImageFolder) else ()
    if skipped:
        is_refused = isinstance(source, ImageFolder) and source.corrupt == "refuse"
        yield Finding(
            "stop" if is_refused else "look",
            "files",
            f"{format_count(len(skipped), 'image')} cannot be used"
            + (", so a study would refuse the folder" if is_refused else "; a study would skip such images"),
            "repair or remove these files"
            + (", or ask the study lead to set data.corrupt = 'skip'" if is_refused else ""),
            tuple(map(redactor.redact_text, skipped)),
        )
