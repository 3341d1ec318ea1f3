"""What a file's tags give away, by name: the value is kept for masking only, and no `repr` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TagKind = Literal["patient", "people and places", "traits", "dates", "free text", "unique numbers", "private", "pixels"]
TAG_KIND_TEXT: dict[TagKind, str] = {
    "patient": "names the patient, the specimen or the request",
    "people and places": "names staff, a place or a device",
    "traits": "describes the patient",
    "dates": "a day or an hour",
    "free text": "text in which anything may stand",
    "unique numbers": "leads back to the archive",
    "private": "a maker's own tags, whose meaning is not public",
    "pixels": "drawn over the picture",
}


@dataclass(frozen=True)
class MetadataTag:
    kind: TagKind
    name: str


@dataclass(frozen=True)
class TagSummary:
    """All that one file tells about people."""

    tags: frozenset[MetadataTag] = frozenset()
    burned_in: Literal["yes", "no", "unsaid", ""] = ""  # whether text stands in the picture itself; "" if no DICOM
    is_deidentified: bool = False  # the file says that its identity was removed: what looks like a name is a pseudonym
    is_damaged: bool = False
    identifiers: frozenset[str] = field(default=frozenset(), repr=False)
