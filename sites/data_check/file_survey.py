"""Lists every file below a site's folder: its kind by its content, and the identifying tags in it. Decodes no pixels.

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

from sites.data.images import IMAGE_FORMATS, MAX_PIXELS
from sites.data_check import phi_dicom, phi_image_metadata
from sites.data_check.findings import ProgressCallback, ignore_progress
from sites.data_check.phi_tags import MetadataTag, TagSummary

HEADER_BYTES = phi_dicom.PREAMBLE_BYTES + len(phi_dicom.DICOM_MAGIC)
FORMAT_BY_SUFFIX = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF", ".tiff": "TIFF", ".bmp": "BMP"}
NO_TAGS = TagSummary()
FORMAT_ALIASES = {"MPO": "JPEG"}  # a camera's JPEG with previews appended


@dataclass(frozen=True)
class SurveyedFile:
    path: str  # relative to the folder
    kind: Literal["image", "dicom", "other", "unreadable"]
    reason: str = ""  # why it is unreadable
    format: str = ""
    size: tuple[int, int] | None = None  # width and height in pixels
    is_16_bit: bool = False
    tag_summary: TagSummary = NO_TAGS

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix.lower()

    @property
    def is_misnamed(self) -> bool:
        return self.kind == "image" and FORMAT_BY_SUFFIX.get(self.suffix, self.format) != self.format


@dataclass(frozen=True)
class FileSurvey:
    root: Path
    files: tuple[SurveyedFile, ...]
    outside_links: tuple[str, ...] = ()  # links out of the folder, or to a missing file
    unreadable_folders: tuple[str, ...] = ()
    num_hidden: int = 0
    num_unread_dicom: int = 0  # DICOM files whose tags were not read because pydicom is not installed

    def files_of_kind(self, kind: str) -> list[SurveyedFile]:
        return [file for file in self.files if file.kind == kind]

    @property
    def image_sizes(self) -> Counter[tuple[int, int]]:
        return Counter(file.size for file in self.files if file.size is not None)


def survey_files(root: Path, on_progress: ProgressCallback = ignore_progress) -> FileSurvey:
    """`root`: a folder, or a single file."""
    outside_links: list[str] = []
    unreadable_folders: list[str] = []
    hidden: list[str] = []
    paths = [root] if root.is_file() else sorted(_walk_files(root, outside_links, unreadable_folders, hidden))
    base = root.parent if root.is_file() else root
    can_read_dicom = _has_pydicom()
    surveyed: list[SurveyedFile] = []
    # warning filters are global to the process, so they are set outside the threads
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        for file in pool.map(lambda path: survey_file(path, base, can_read_dicom), paths):
            surveyed.append(file)
            on_progress("examining files", len(surveyed), len(paths))
    num_unread_dicom = 0 if can_read_dicom else sum(file.kind == "dicom" for file in surveyed)
    return FileSurvey(
        root, tuple(surveyed), tuple(outside_links), tuple(unreadable_folders), len(hidden), num_unread_dicom
    )


def survey_file(file: Path, base: Path, can_read_dicom: bool) -> SurveyedFile:
    path = file.relative_to(base).as_posix()
    try:
        if not file.is_file():  # reading a named pipe would block forever
            return SurveyedFile(path, "unreadable", "not a regular file")
        with file.open("rb") as stream:
            header = stream.read(HEADER_BYTES)
    except OSError as error:
        return SurveyedFile(path, "unreadable", _error_reason(error))
    if not header:
        return SurveyedFile(path, "unreadable", "empty")
    if phi_dicom.is_dicom(header):
        tag_summary = phi_dicom.read_dicom_tags(file) if can_read_dicom else None
        return SurveyedFile(path, "dicom", tag_summary=tag_summary or TagSummary(burned_in="unsaid"))
    if (
        can_read_dicom
        and phi_dicom.may_lack_preamble(header)
        and (tag_summary := phi_dicom.read_dicom_tags(file, without_preamble=True))
    ):
        return SurveyedFile(path, "dicom", tag_summary=tag_summary)
    return _survey_image(file, path)


def _survey_image(file: Path, path: str) -> SurveyedFile:
    try:
        with Image.open(file, formats=IMAGE_FORMATS) as image:
            image_format = FORMAT_ALIASES.get(str(image.format), str(image.format))
            if image.width * image.height > MAX_PIXELS:
                return SurveyedFile(path, "image", format=image_format, size=image.size)
            is_16_bit = image.mode.startswith("I;16") or (image.mode == "I" and image_format == "PNG")
            return SurveyedFile(
                path=path,
                kind="image",
                reason="",
                format=image_format,
                size=image.size,
                is_16_bit=is_16_bit,
                tag_summary=_read_tags_safely(file, image),
            )
    except UnidentifiedImageError:
        if path.lower().endswith(tuple(FORMAT_BY_SUFFIX)):
            return SurveyedFile(
                path, "unreadable", f"no {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]} image, or a damaged one"
            )
        return SurveyedFile(path, "other")
    except OSError as error:
        return SurveyedFile(path, "unreadable", _error_reason(error))
    except Exception as error:  # a damaged file can raise anything inside Pillow
        return SurveyedFile(path, "unreadable", f"damaged ({type(error).__name__})")


def _read_tags_safely(file: Path, image: Image.Image) -> TagSummary:
    try:
        return phi_image_metadata.read_image_tags(file, image)
    except Exception:  # the pixels are usable, but the metadata may contain anything
        return TagSummary(frozenset({MetadataTag("private", "metadata that cannot be read")}))


def _error_reason(error: OSError) -> str:
    """Without the path, which the text of an OSError contains."""
    return error.strerror or "damaged"


def _walk_files(
    root: Path, outside_links: list[str], unreadable_folders: list[str], hidden: list[str]
) -> Iterator[Path]:
    resolved_root = root.resolve()

    def on_error(error: OSError) -> None:
        unreadable_folders.append(Path(str(error.filename)).relative_to(root).as_posix())

    for folder, subfolders, files in os.walk(root, onerror=on_error):
        folder_path = Path(folder)
        hidden += [name for name in (*subfolders, *files) if name.startswith(".")]
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in (*subfolders, *sorted(files)):
            path = folder_path / name
            if name.startswith(".") or not path.is_symlink():
                continue
            if not _is_inside(path, resolved_root):
                outside_links.append(path.relative_to(root).as_posix())
        yield from (
            path
            for name in files
            if not name.startswith(".")
            and (not (path := folder_path / name).is_symlink() or _is_inside(path, resolved_root))
        )


def _is_inside(link: Path, resolved_root: Path) -> bool:
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # to a missing file, or in a loop
        return False
    return target.is_relative_to(resolved_root)


def _has_pydicom() -> bool:
    from importlib.util import find_spec

    return find_spec("pydicom") is not None
