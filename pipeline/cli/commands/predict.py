"""`hemofed predict`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.bundle.bundle import Bundle, Precision
from deploy.bundle.operating_points import Point
from deploy.bundle.trust_store import Trust
from deploy.imaging.images import Picture, expand, read_bytes, read_path, readable
from deploy.inference.local_calibration import lab_for
from deploy.inference.runtime import Runtime
from deploy.slide.html_report import headline, rows_of
from deploy.slide.outputs import Session, csv_of, keep, notes_on, write_dicom, write_report
from deploy.slide.prevalence import NOTICE
from deploy.slide.reader import How, Reader, Reading, Slide, slide_of
from pipeline.cli.output import console, errors, print_json, table
from pipeline.core.errors import BadData, BadStudy, Refused

SHOWN = 40  # pictures in the table


@dataclass(frozen=True)
class Wish:
    bundle: Path
    paths: tuple[Path, ...]
    out: Path | None
    dicom: Path | None
    how: How
    point: str | None
    diameter: float | None
    precision: Precision | None
    delivered: bool
    threads: int


def predict_command(wish: Wish, as_csv: bool, json: bool) -> None:
    """One broken picture does not stop the others; the exit code tells that there was one."""
    if as_csv and json:
        raise BadStudy("give either --csv or --json")
    for folder in filter(None, (wish.out, wish.dicom)):  # another slide's pictures must not lie between this one's
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadStudy(
                f"{folder} is not an empty folder; choose another one for this slide, or remove what a stopped call left"
            )
    bundle = Bundle.open(wish.bundle, Trust.here())
    runtime = Runtime(bundle, wish.precision, wish.threads, None if wish.delivered else lab_for(bundle, wish.precision))
    point = point_of(runtime, wish.point)
    done = _read(wish, Reader(runtime, point, wish.how, wish.diameter))
    slide = slide_of(done.readings, runtime, point, [*_of_one_slide(done), *notes_on(done)])
    about = runtime.about()
    written = write_report(wish.out, done, slide, about) if wish.out else []
    written += write_dicom(wish.dicom, done, slide, about) if wish.dicom else []
    if json:
        pictures = [r.told() for r in done.readings] + [{"path": name, "error": why} for name, why in done.failed]
        print_json(
            {
                "notice": NOTICE,
                "bundle": about,
                "images": pictures,
                "slide": slide.told(),
                "written": [str(path) for path in written],
            }
        )
    elif as_csv:
        sys.stdout.write(csv_of(done.readings))
    else:
        _show(done, slide, about, written)
    for name, why in done.failed:
        errors.print(f"error: {why if why.startswith(name) else f'{name}: {why}'}", soft_wrap=True)
    if done.failed:
        sys.exit(1)


def _of_one_slide(done: Session) -> list[str]:
    if not done.sources:
        return []
    from deploy.slide.dicom_sources import one_slide

    return one_slide(list(done.sources))


def point_of(runtime: Runtime, wanted: str | None) -> Point | None:
    """By name, or the measured point nearest above a probability."""
    calibration = runtime.calibration
    if wanted is None or calibration.point(wanted):
        return calibration.point(wanted)
    try:
        probability = float(wanted)
    except ValueError:
        probability = -1.0
    names = ", ".join(p.name for p in calibration.points) or "none: nobody measured this model"
    if not 0 < probability < 1 or not calibration.curve:
        raise BadStudy(f"--point {wanted}: no such operating point; valid: {names}, or a probability between 0 and 1")
    return calibration.at(probability)


def _pictures(paths: tuple[Path, ...]) -> Iterator[tuple[str, list[Picture] | str]]:
    for path in paths:
        if str(path) == "-":
            yield "-", _tried(lambda: read_bytes(sys.stdin.buffer.read(), "-"))
            continue
        files = list(expand([path]))
        if not files:
            yield readable(path), "no such file" if not path.exists() else "no picture in this folder"
        for file in files:
            yield readable(file), _tried(lambda file=file: read_path(file))


def _tried(read: Any) -> list[Picture] | str:
    try:
        found: list[Picture] = read()
        return found
    except BadData as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def _read(wish: Wish, reader: Reader) -> Session:
    """Fields as they come; single cells together at the end."""
    done = Session()
    singles: list[Picture] = []
    with errors.status("reading") as status:
        for name, pictures in _pictures(wish.paths):
            status.update(f"reading {name}")
            if isinstance(pictures, str):
                done.failed.append((name, pictures))
                continue
            for picture in pictures:
                if reader.shows_field(picture):
                    _take(wish, done, [picture], lambda some: [reader.field(one) for one in some])
                else:
                    singles.append(picture)
        if singles:
            _take(wish, done, singles, reader.cells)
    return done


def _take(wish: Wish, done: Session, pictures: list[Picture], read: Callable[[list[Picture]], list[Reading]]) -> None:
    try:
        readings = read(pictures)
    except (BadData, Refused) as error:
        done.failed += [(picture.name, str(error)) for picture in pictures]
        return
    for picture, reading in zip(pictures, readings, strict=True):
        keep(done, picture, _once(reading, picture, done), wish.out, wish.dicom)


def _once(reading: Reading, picture: Picture, done: Session) -> Reading:
    """The same picture under two names shows no more cells than one."""
    digest = hashlib.sha256(f"{picture.pixels.shape}".encode() + picture.pixels.tobytes()).digest()
    if digest not in done.seen:
        done.seen[digest] = picture.name
        return reading
    return replace(reading, repeats=done.seen[digest])


def _show(done: Session, slide: Slide, about: dict[str, Any], written: list[Path]) -> None:
    fields = [r for r in done.readings if r.kind == "field"]
    cells = [r for r in done.readings if r.kind == "cell"]
    if cells:
        rows = [
            [_short(r.name), r.cells[0].label or "", r.cells[0].why or "", f"{r.cells[0].probability:.4f}"]
            for r in cells[:SHOWN]
        ]
        of = f"p({slide.positive})" if slide.positive else "probability"  # of a class that need not be the one named
        console.print(table(["cell", "class", "note", of], rows, words=3))
    if fields:
        rows = [[_short(r.name), f"{len(r.cells):,}", f"{sum(c.counted for c in r.cells):,}", f"{sum(c.flagged for c in r.cells):,}"]
                for r in fields[:SHOWN]]  # fmt: skip
        console.print(table(["field", "found", "counted", f"called {slide.positive or 'positive'}"], rows))
    if more := sum(max(0, len(some) - SHOWN) for some in (cells, fields)):
        console.print(f"… and {more} more; --csv or --json list all")
    if slide.positive is not None and done.readings:
        told = slide.told()
        console.print(table(["slide report", ""], [list(row) for row in rows_of(told, about)], words=2))
        for words in (*slide.doubts, *slide.notes):
            console.print(f"warning: {words}", style="yellow", soft_wrap=True)
        console.print(headline(told), style="bold", soft_wrap=True)
    for path in [path for path in written if not path.name.startswith("overlay-")]:
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(NOTICE, style="yellow")


def _short(name: str) -> str:
    """The end of a path, without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in Path(name).name or name)
