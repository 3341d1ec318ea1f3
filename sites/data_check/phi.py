"""What files tell about people, beside their pixels: names of tags and numbers of files, never a value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sites.data_check.file_survey import Seen, Survey
from sites.data_check.findings import Finding, count, some
from sites.data_check.phi_tags import Kind, Tag
from sites.data_check.redaction import Mask

DIRECT: Kind = "patient"
OFFICER = "ask the data protection officer whether they may lie here as they are"
CLEAN = "remove them (PS3.15, basic profile, e.g. with the archive's own de-identification)"
# hemofed turns pictures as their EXIF says, so that has to stay
STRIP = "save the pictures without metadata (e.g. `exiftool -all= -tagsfromfile @ -icc_profile -orientation`)"


@dataclass(frozen=True)
class Identity:
    dicom: int
    tags: dict[Tag, int]  # of DICOM files: how many have it
    beside: dict[Tag, int]  # of pictures
    burned_in: dict[str, int]  # yes, no, unsaid: DICOM files
    cleaned: int  # that say they were de-identified
    damaged: int
    named_paths: int

    def json(self) -> dict[str, Any]:
        return {
            "dicom_files": self.dicom, "dicom_tags": _rows(self.tags), "picture_tags": _rows(self.beside),
            "burned_in": self.burned_in, "says_de_identified": self.cleaned, "damaged_dicom": self.damaged,
            "paths_that_name_somebody": self.named_paths,
        }  # fmt: skip


def mask_of(found: Survey) -> Mask:
    return Mask.of(secret for seen in found.files for secret in seen.told.secrets)


def ranked(tags: dict[Tag, int]) -> list[tuple[Tag, int]]:
    return sorted(tags.items(), key=lambda item: (item[0].kind != DIRECT, item[0].kind, -item[1], item[0].name))


def identify(found: Survey) -> Identity:
    dicom = found.of("dicom")
    return Identity(
        dicom=len(dicom),
        tags=_tags(dicom),
        beside=_tags(found.of("image")),
        burned_in=dict(Counter(seen.told.burned_in for seen in dicom)),
        cleaned=sum(seen.told.cleaned for seen in dicom),
        damaged=sum(seen.told.damaged for seen in dicom),
        named_paths=len(named(found)),
    )


def named(found: Survey) -> list[str]:
    """Paths with somebody's name or number; a pseudonym of a file that says it was cleaned is nobody's."""
    mask = Mask.of(secret for seen in found.files if not seen.told.cleaned for secret in seen.told.secrets)
    return [seen.path for seen in found.files if any(mask.names(part) for part in seen.path.split("/"))]


def findings(found: Survey, mask: Mask) -> Iterator[Finding]:
    dicom = found.of("dicom")

    def shown(files: Sequence[Seen]) -> tuple[str, ...]:
        return tuple(mask.path(seen.path) for seen in files)

    if paths := named(found):
        yield Finding(
            "stop", "identity", f"{count(len(paths), 'path')} with a name or number that stands in the files' own tags",
            "rename files and folders: their names appear in messages and logs", tuple(map(mask.path, paths)),
        )  # fmt: skip
    if burned := [seen for seen in dicom if seen.told.burned_in == "yes"]:
        yield Finding(
            "stop", "identity", f"{count(len(burned), 'DICOM file')} with text or a slide's label in the picture itself",
            "black out the text, or take these files out: a model sees it, and may keep it", shown(burned),
        )  # fmt: skip
    direct = [seen for seen in dicom if not seen.told.cleaned and any(t.kind == DIRECT for t in seen.told.tags)]
    if direct:
        yield Finding(
            "look", "identity", f"the patient is named in {count(len(direct), 'DICOM file')}: {_names(direct, DIRECT)}",
            f"{CLEAN}, or {OFFICER}; hemofed reads pixels alone", shown(direct),
        )  # fmt: skip
    others = [seen for seen in dicom if any(t.kind not in (DIRECT, "unique numbers") for t in seen.told.tags)]
    if others:
        kinds = sorted({t.kind for seen in others for t in seen.told.tags} - {DIRECT, "unique numbers"})
        yield Finding(
            "look", "identity", f"other identifying tags in {count(len(others), 'DICOM file')}: {', '.join(kinds)}",
            f"{CLEAN}, or {OFFICER}", shown(others),
        )  # fmt: skip
    if unsaid := [seen for seen in dicom if seen.told.burned_in == "unsaid"]:
        yield Finding(
            "look", "identity",
            f"whether text stands in the picture is not said (BurnedInAnnotation) in {count(len(unsaid), 'DICOM file')}",
            "look at them", shown(unsaid),
        )  # fmt: skip
    if damaged := [seen for seen in dicom if seen.told.damaged]:
        yield Finding(
            "look", "identity", f"tags cannot be read in {count(len(damaged), 'DICOM file')}", "export them again",
            shown(damaged),
        )  # fmt: skip
    if found.unread:
        yield Finding(
            "look", "identity", f"{count(found.unread, 'DICOM file')} not looked into: pydicom is not installed",
            "pip install 'hemofed[hospital]', and check again",
        )  # fmt: skip
    if beside := [seen for seen in found.of("image") if seen.told.tags]:
        names = some(sorted({t.name for seen in beside for t in seen.told.tags}), 12)
        yield Finding(
            "look", "identity", f"text or numbers beside the pixels of {count(len(beside), 'picture')}: {names}",
            f"{STRIP}, or {OFFICER}; hemofed reads pixels alone", shown(beside),
        )  # fmt: skip


def _tags(files: Sequence[Seen]) -> dict[Tag, int]:
    return dict(Counter(tag for seen in files for tag in seen.told.tags))


def _rows(tags: dict[Tag, int]) -> list[dict[str, Any]]:
    return [{"tag": tag.name, "kind": tag.kind, "files": number} for tag, number in ranked(tags)]


def _names(files: Sequence[Seen], kind: Kind) -> str:
    counts = Counter(tag.name for seen in files for tag in seen.told.tags if tag.kind == kind)
    return some([f"{name} ({counts[name]:,})" for name in sorted(counts, key=lambda name: (-counts[name], name))], 12)
