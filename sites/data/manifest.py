"""A CSV list of images: `path,label`, optionally `split`, and any other columns as natural keys."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.errors import BadData, MissingData
from pipeline.core.registry import near
from sites.data.base import SPLITS
from sites.data.images import listing

UNITS = ("patient", "slide", "group")  # coarsest first: whom privacy protects
UNKNOWN = "unknown"  # a key's name where the cell is blank
OWN = ("path", "label", "split", "")  # columns that are no key; "" is a spreadsheet's row number


@dataclass(frozen=True)
class Entry:
    shown: str  # as the person knows the file
    file: Path
    label: str
    split: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[tuple[int, dict[str, str]]]  # line number, cells


def inside(folder: Path, relative: str) -> Path:
    """The file, unless it lies outside `folder`, be it by `..`, from the root or through a symbolic link."""
    try:
        file = (folder / relative).resolve()
        leaves = Path(relative).is_absolute() or not file.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a zero byte
        raise BadData(f"{relative!r} cannot be followed ({error}); correct the path") from error
    if leaves:
        raise BadData(f"{relative} leads out of {folder}; copy the file into it and give its path from there")
    return file


def read_manifest(
    folder: Path, name: str, unit: str | None, classes: tuple[str, ...] | None
) -> tuple[list[Entry], str | None]:
    """The images, and the column of the privacy unit: `unit`, else the first of UNITS that is there."""
    manifest = inside(folder, name)
    if not manifest.is_file():
        raise MissingData(f"there is no manifest {manifest}; correct data.manifest, which is relative to {folder}")
    table = _read(manifest)
    unit = unit or next((u for u in UNITS if u in table.columns), None)
    needed = ("path", "label", *([unit] if unit else []))
    if lacking := [column for column in needed if column not in table.columns]:
        raise BadData(
            f"{manifest}, line 1: no column named {' or '.join(lacking)}; found: {', '.join(table.columns)}; "
            "rename a column, or say data.patient if another one names the patient"
        )
    entries: list[Entry] = []
    problems: list[str] = []
    first: dict[Path, int] = {}
    for line, row in table.rows:
        try:
            entry = _entry(folder, row, needed, classes)
            if first.setdefault(entry.file, line) != line:
                raise BadData(f"{entry.shown} is already on line {first[entry.file]}; keep one of them")
            entries.append(entry)
        except BadData as error:
            problems.append(f"line {line}: {error}")
    if problems:
        raise BadData(f"{manifest} cannot be used:{listing(problems)}")
    if not entries:
        raise BadData(f"{manifest} lists no images; give each a line with its path and label")
    return entries, unit


def _read(manifest: Path) -> Table:
    try:
        text = manifest.read_bytes().decode("utf-8-sig")  # spreadsheets write a byte-order mark
    except UnicodeDecodeError as error:
        raise BadData(f"{manifest} is not UTF-8 ({error}); save it as CSV UTF-8") from error
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        columns = [cell.strip() for cell in next(reader, [])]
        lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise BadData(f"{manifest}, line {reader.line_num}: {error}; correct that line, mostly its quotes") from error
    if len(set(columns)) < len(columns):
        raise BadData(f"{manifest}, line 1: a column name appears twice in {', '.join(columns)}; rename one")
    if uneven := [
        f"line {line}: {len(cells)} cells under {len(columns)} columns; add what is missing, or put quotes around "
        f"a cell that contains {separator!r}"
        for line, cells in lines
        if len(cells) != len(columns)
    ]:
        raise BadData(f"{manifest} cannot be used:{listing(uneven)}")
    return Table(columns, [(n, dict(zip(columns, map(str.strip, cells), strict=True))) for n, cells in lines])


def _entry(folder: Path, row: Mapping[str, str], needed: tuple[str, ...], classes: tuple[str, ...] | None) -> Entry:
    for column in needed:
        if not row[column]:
            raise BadData(f"{column} is empty; fill it in or delete the line")
    if classes is not None and row["label"] not in classes:
        raise BadData(f"label {row['label']!r} is not in data.classes; {near(row['label'], classes)}")
    split = row["split"].lower() if "split" in row else None
    if split is not None and split not in SPLITS:
        raise BadData(f"split {row['split']!r} is not known; {near(split, SPLITS)}")
    keys = {column: cell or UNKNOWN for column, cell in row.items() if column not in OWN}
    return Entry(row["path"], inside(folder, row["path"]), row["label"], split, keys)
