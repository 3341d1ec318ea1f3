"""Every file below a site's folder: what it is by its content, and what its tags tell. No pixel is decoded here.

Links are not followed out of the folder, hidden files are not opened, and nothing is changed.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, UnidentifiedImageError

from sites.data.images import FORMATS, MAX_PIXELS
from sites.data_check import phi_dicom, phi_image_metadata
from sites.data_check.findings import Tick, silent
from sites.data_check.phi_tags import Tag, Told

HEAD = phi_dicom.PREAMBLE + len(phi_dicom.MAGIC)
NAMED = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF", ".tiff": "TIFF", ".bmp": "BMP"}
SILENT = Told()
SAME = {"MPO": "JPEG"}  # a camera's JPEG with previews behind it


@dataclass(frozen=True)
class Seen:
    path: str  # from the folder
    kind: Literal["image", "dicom", "other", "unreadable"]
    reason: str = ""  # why it is unreadable
    format: str = ""
    size: tuple[int, int] | None = None  # pixels across and down
    deep: bool = False  # 16 bits
    told: Told = SILENT

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix.lower()

    @property
    def misnamed(self) -> bool:
        return self.kind == "image" and NAMED.get(self.suffix, self.format) != self.format


@dataclass(frozen=True)
class Survey:
    root: Path
    files: tuple[Seen, ...]
    leads_out: tuple[str, ...] = ()  # links to somewhere else, or nowhere
    closed: tuple[str, ...] = ()  # folders that could not be opened
    hidden: int = 0
    unread: int = 0  # DICOM files that could not be looked into for want of pydicom

    def of(self, kind: str) -> list[Seen]:
        return [seen for seen in self.files if seen.kind == kind]

    @property
    def sizes(self) -> Counter[tuple[int, int]]:
        return Counter(seen.size for seen in self.files if seen.size is not None)


def survey(root: Path, tick: Tick = silent) -> Survey:
    """`root`: a folder, or a single file."""
    leads_out: list[str] = []
    closed: list[str] = []
    hidden: list[str] = []
    paths = [root] if root.is_file() else sorted(_walk(root, leads_out, closed, hidden))
    base = root.parent if root.is_file() else root
    can_read = _has_pydicom()
    seen: list[Seen] = []
    # filters belong to the process, so they are set around the pool and not inside its threads
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        for one in pool.map(lambda path: look_at(path, base, can_read), paths):
            seen.append(one)
            tick("looking at files", len(seen), len(paths))
    unread = 0 if can_read else sum(one.kind == "dicom" for one in seen)
    return Survey(root, tuple(seen), tuple(leads_out), tuple(closed), len(hidden), unread)


def look_at(file: Path, base: Path, can_read_dicom: bool) -> Seen:
    path = file.relative_to(base).as_posix()
    try:
        if not file.is_file():  # reading a named pipe would wait for ever
            return Seen(path, "unreadable", "no regular file")
        with file.open("rb") as opened:
            head = opened.read(HEAD)
    except OSError as error:
        return Seen(path, "unreadable", _why(error))
    if not head:
        return Seen(path, "unreadable", "empty")
    if phi_dicom.is_dicom(head):
        told = phi_dicom.read_tags(file) if can_read_dicom else None
        return Seen(path, "dicom", told=told or Told(burned_in="unsaid"))
    if can_read_dicom and phi_dicom.may_be_bare(head) and (told := phi_dicom.read_tags(file, bare=True)):
        return Seen(path, "dicom", told=told)
    return _picture(file, path)


def _picture(file: Path, path: str) -> Seen:
    try:
        with Image.open(file, formats=FORMATS) as image:
            kind = SAME.get(str(image.format), str(image.format))
            if image.width * image.height > MAX_PIXELS:
                return Seen(path, "image", format=kind, size=image.size)
            deep = image.mode.startswith("I;16") or (image.mode == "I" and kind == "PNG")
            return Seen(path, "image", "", kind, image.size, deep, _told(file, image))
    except UnidentifiedImageError:
        if path.lower().endswith(tuple(NAMED)):
            return Seen(path, "unreadable", f"no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image, or a damaged one")
        return Seen(path, "other")
    except OSError as error:
        return Seen(path, "unreadable", _why(error))
    except Exception as error:  # a damaged file can raise anything inside Pillow
        return Seen(path, "unreadable", f"damaged ({type(error).__name__})")


def _told(file: Path, image: Image.Image) -> Told:
    try:
        return phi_image_metadata.read_tags(file, image)
    except Exception:  # rubbish beside the pixels does not spoil them, but nobody knows what it says
        return Told(frozenset({Tag("private", "metadata that cannot be read")}))


def _why(error: OSError) -> str:
    """Without the path that the text of an OSError has."""
    return error.strerror or "damaged"


def _walk(root: Path, leads_out: list[str], closed: list[str], hidden: list[str]) -> Iterator[Path]:
    inside = root.resolve()

    def cannot(error: OSError) -> None:
        closed.append(Path(str(error.filename)).relative_to(root).as_posix())

    for folder, below, files in os.walk(root, onerror=cannot):
        here = Path(folder)
        hidden += [name for name in (*below, *files) if name.startswith(".")]
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in (*below, *sorted(files)):
            path = here / name
            if name.startswith(".") or not path.is_symlink():
                continue
            if not _stays(path, inside):
                leads_out.append(path.relative_to(root).as_posix())
        yield from (
            path
            for name in files
            if not name.startswith(".") and (not (path := here / name).is_symlink() or _stays(path, inside))
        )


def _stays(link: Path, inside: Path) -> bool:
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # leads nowhere, or in a circle
        return False
    return target.is_relative_to(inside)


def _has_pydicom() -> bool:
    from importlib.util import find_spec

    return find_spec("pydicom") is not None
