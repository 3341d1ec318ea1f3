"""A CSV list of images: `path,label`, optionally `split`, and any other columns as natural keys."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.errors import DataError, MissingDataError
from pipeline.core.registry import suggest_names
from sites.data.base import SPLITS
from sites.data.images import format_problems

UNIT_COLUMNS = ("patient", "slide", "group")  # coarsest first: the first one present is the privacy unit
UNKNOWN_VALUE = "unknown"  # replaces a blank cell
RESERVED_COLUMNS = ("path", "label", "split", "")  # columns that are not keys; "" is a spreadsheet's row number


@dataclass(frozen=True)
class ManifestEntry:
    display_name: str  # the path as the manifest or folder gives it
    file: Path
    label: str
    split: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ManifestTable:
    columns: list[str]
    rows: list[tuple[int, dict[str, str]]]  # line number, cells


def resolve_inside(folder: Path, relative: str) -> Path:
    """The file's resolved path; raises `DataError` if `..`, an absolute path or a symbolic link leads out of `folder`."""
    try:
        file = (folder / relative).resolve()
        is_outside = Path(relative).is_absolute() or not file.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a zero byte
        raise DataError(f"{relative!r} cannot be followed ({error}); correct the path") from error
    if is_outside:
        raise DataError(f"{relative} leads out of {folder}; copy the file into it and give its path from there")
    return file


def read_manifest(
    folder: Path, name: str, unit_column: str | None, classes: tuple[str, ...] | None
) -> tuple[list[ManifestEntry], str | None]:
    """The entries, and the column of the privacy unit: `unit_column`, or else the first of `UNIT_COLUMNS` present."""
    manifest = resolve_inside(folder, name)
    if not manifest.is_file():
        raise MissingDataError(f"there is no manifest {manifest}; correct data.manifest, which is relative to {folder}")
    table = _read_table(manifest)
    unit_column = unit_column or next((u for u in UNIT_COLUMNS if u in table.columns), None)
    required = ("path", "label", *([unit_column] if unit_column else []))
    if missing := [column for column in required if column not in table.columns]:
        raise DataError(
            f"{manifest}, line 1: no column named {' or '.join(missing)}; found: {', '.join(table.columns)}; "
            "rename a column, or set data.patient to the column that names the patient"
        )
    entries: list[ManifestEntry] = []
    problems: list[str] = []
    first_line: dict[Path, int] = {}
    for line, row in table.rows:
        try:
            entry = _parse_entry(folder, row, required, classes)
            if first_line.setdefault(entry.file, line) != line:
                raise DataError(f"{entry.display_name} is already on line {first_line[entry.file]}; keep one of them")
            entries.append(entry)
        except DataError as error:
            problems.append(f"line {line}: {error}")
    if problems:
        raise DataError(f"{manifest} cannot be used:{format_problems(problems)}")
    if not entries:
        raise DataError(f"{manifest} lists no images; give each a line with its path and label")
    return entries, unit_column


def _read_table(manifest: Path) -> ManifestTable:
    try:
        text = manifest.read_bytes().decode("utf-8-sig")  # spreadsheets write a byte-order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{manifest} is not UTF-8 ({error}); save it as CSV UTF-8") from error
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        columns = [cell.strip() for cell in next(reader, [])]
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise DataError(
            f"{manifest}, line {reader.line_num}: {error}; correct that line, probably its quotes"
        ) from error
    if len(set(columns)) < len(columns):
        raise DataError(f"{manifest}, line 1: a column name appears twice in {', '.join(columns)}; rename one")
    if uneven_lines := [
        f"line {line}: {len(cells)} cells under {len(columns)} columns; add what is missing, or put quotes around "
        f"a cell that contains {separator!r}"
        for line, cells in lines
        if len(cells) != len(columns)
    ]:
        raise DataError(f"{manifest} cannot be used:{format_problems(uneven_lines)}")
    return ManifestTable(columns, [(n, dict(zip(columns, map(str.strip, cells), strict=True))) for n, cells in lines])


def _parse_entry(
    folder: Path, row: Mapping[str, str], required: tuple[str, ...], classes: tuple[str, ...] | None
) -> ManifestEntry:
    for column in required:
        if not row[column]:
            raise DataError(f"{column} is empty; fill it in or delete the line")
    if classes is not None and row["label"] not in classes:
        raise DataError(f"label {row['label']!r} is not in data.classes; {suggest_names(row['label'], classes)}")
    split = row["split"].lower() if "split" in row else None
    if split is not None and split not in SPLITS:
        raise DataError(f"split {row['split']!r} is not known; {suggest_names(split, SPLITS)}")
    keys = {column: cell or UNKNOWN_VALUE for column, cell in row.items() if column not in RESERVED_COLUMNS}
    return ManifestEntry(row["path"], resolve_inside(folder, row["path"]), row["label"], split, keys)
