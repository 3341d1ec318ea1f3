"""Identifying tags in a file, by name. Values are stored only for redaction, and no `repr` shows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TagKind = Literal["patient", "people and places", "traits", "dates", "free text", "unique numbers", "private", "pixels"]
TAG_KIND_TEXT: dict[TagKind, str] = {
    "patient": "identifies the patient, the specimen or the request",
    "people and places": "names staff, a place or a device",
    "traits": "describes the patient",
    "dates": "a date or time",
    "free text": "free text, which may contain anything",
    "unique numbers": "a unique ID that leads back to the archive",
    "private": "a vendor's private tags, whose meaning is not public",
    "pixels": "drawn over the image",
}


@dataclass(frozen=True)
class MetadataTag:
    kind: TagKind
    name: str


@dataclass(frozen=True)
class TagSummary:
    """The identifying tags of one file."""

    tags: frozenset[MetadataTag] = frozenset()
    burned_in: Literal["yes", "no", "unsaid", ""] = ""  # whether the image itself shows text; "" if not DICOM
    is_deidentified: bool = False  # marked so: what looks like a name is a pseudonym
    is_damaged: bool = False
    identifiers: frozenset[str] = field(default=frozenset(), repr=False)
