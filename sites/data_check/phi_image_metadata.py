"""Identifying metadata of a JPEG, PNG, TIFF or BMP, written by cameras and programs: names of tags, never values."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from sites.data_check.phi_tags import MetadataTag, TagKind, TagSummary

GPS_IFD, EXIF_IFD = 0x8825, 0x8769
# Colour profiles, makers, models and programs identify no person. UserComment starts with eight bytes for its encoding.
EXIF_TAGS: dict[int, tuple[TagKind, str]] = {
    0x010E: ("free text", "ImageDescription"),
    0x0132: ("dates", "DateTime"),
    0x013B: ("people and places", "Artist"),
    0x013C: ("people and places", "HostComputer"),
    0x8298: ("people and places", "Copyright"),
    0x9003: ("dates", "DateTimeOriginal"),
    0x9004: ("dates", "DateTimeDigitized"),
    0x927C: ("private", "MakerNote"),
    0x9286: ("free text", "UserComment"),
    0x9C9B: ("free text", "XPTitle"),
    0x9C9C: ("free text", "XPComment"),
    0x9C9D: ("people and places", "XPAuthor"),
    0x9C9E: ("free text", "XPKeywords"),
    0x9C9F: ("free text", "XPSubject"),
    0xA420: ("unique numbers", "ImageUniqueID"),
    0xA430: ("people and places", "CameraOwnerName"),
    0xA431: ("people and places", "BodySerialNumber"),
    0xA435: ("people and places", "LensSerialNumber"),
}
PERSON_TAG_NAMES = frozenset({"Artist", "XPAuthor", "CameraOwnerName", "Author"})
INFO_TAGS: dict[str, tuple[TagKind, str]] = {
    "comment": ("free text", "Comment"),
    "xmp": ("free text", "XMP"),
    "photoshop": ("free text", "IPTC"),
}
# Keywords of the PNG specification. Others are not shown, because a keyword may contain anything.
PNG_KEYWORDS: dict[str, tuple[TagKind, str]] = {
    "author": ("people and places", "Author"),
    "copyright": ("people and places", "Copyright"),
    "creation time": ("dates", "Creation Time"),
    "comment": ("free text", "Comment"),
    "description": ("free text", "Description"),
    "title": ("free text", "Title"),
    "xml:com.adobe.xmp": ("free text", "XMP"),
}
HARMLESS_KEYWORDS = frozenset({"software", "disclaimer", "warning", "source"})
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt")
EXIF_CHUNK = b"eXIf"
MAX_CHUNK_BYTES = 1 << 20  # read of one chunk


def read_image_tags(file: Path, image: Image.Image) -> TagSummary:
    """Decodes no pixels. Pillow would, to find chunks behind the pixels of a PNG, so these are parsed here."""
    chunks = [*_png_chunks(file)] if image.format == "PNG" else []
    exif = _parse_exif(chunks) if image.format == "PNG" else image.getexif()
    tags: set[MetadataTag] = set()
    identifiers: set[str] = set()
    for tag_id, value in [*exif.items(), *exif.get_ifd(EXIF_IFD).items()]:
        if tag_id in EXIF_TAGS and _value_text(value):
            tags.add(MetadataTag(*EXIF_TAGS[tag_id]))
            if EXIF_TAGS[tag_id][1] in PERSON_TAG_NAMES:
                identifiers.add(_value_text(value))
    if any(_value_text(value) for value in exif.get_ifd(GPS_IFD).values()):
        tags.add(MetadataTag("people and places", "GPS"))
    if image.format != "PNG":
        tags |= {MetadataTag(*kind_and_name) for key, kind_and_name in INFO_TAGS.items() if image.info.get(key)}
    for keyword, text in _iter_texts(chunks):
        kind, name = PNG_KEYWORDS.get(keyword, ("free text", "other text"))
        if keyword not in HARMLESS_KEYWORDS:
            tags.add(MetadataTag(kind, name))
            identifiers |= {text} if name in PERSON_TAG_NAMES else set()
    return TagSummary(frozenset(tags), identifiers=frozenset(identifiers))


def _value_text(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-16-le" if value[1:2] == b"\0" else "latin-1", "ignore")
    return str(value).strip("\0 \t\r\n")


def _png_chunks(file: Path) -> Iterator[tuple[bytes, bytes]]:
    """(kind, content) of every text and EXIF chunk, also behind the pixels."""
    with file.open("rb") as png:
        if png.read(8) != PNG_SIGNATURE:
            return
        while len(header := png.read(8)) == 8:
            length, kind = struct.unpack(">I4s", header)
            end = png.tell() + length + 4  # after the checksum
            if kind in (*TEXT_CHUNKS, EXIF_CHUNK):
                yield kind, png.read(min(length, MAX_CHUNK_BYTES))
            png.seek(end)


def _parse_exif(chunks: list[tuple[bytes, bytes]]) -> Image.Exif:
    exif = Image.Exif()
    for kind, content in chunks:
        if kind == EXIF_CHUNK:
            exif.load(content)
    return exif


def _iter_texts(chunks: list[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
    """(keyword, text); compressed text is returned as "". An iTXt chunk has a flag, a method, a language and a
    translated keyword before its text."""
    for kind, content in chunks:
        if kind == EXIF_CHUNK:
            continue
        keyword, _, rest = content.partition(b"\0")
        text = rest.decode("latin-1") if kind == b"tEXt" else ""
        if kind == b"iTXt" and rest[:1] == b"\0":
            text = rest.split(b"\0")[-1].decode("utf-8", "ignore")
        yield keyword.decode("latin-1").strip().casefold(), text
