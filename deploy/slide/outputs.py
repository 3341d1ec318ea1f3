"""What a slide leaves on disk: a page, a table of cells, pictures, results as DICOM."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deploy.imaging.images import Picture
from deploy.slide.html_report import headline, page, rows_of
from deploy.slide.overlays import Gallery, overlay
from deploy.slide.prevalence import NOTICE
from deploy.slide.reader import Reading, Slide
from pipeline.core.errors import BadStudy
from pipeline.core.files import full_disk_is_named, write_atomically

COLUMNS = (
    "path",
    "x0",
    "y0",
    "x1",
    "y1",
    "kind",
    "class",
    "probability",
    "probability_of",
    "flagged",
    "counted",
    "why",
    "repeats",
)
IN_PAGE = 12  # overlays
MOST_NOTES = 3  # pictures named


@dataclass
class Session:
    """What has been read so far."""

    readings: list[Reading] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    gallery: Gallery = field(default_factory=Gallery)
    overlays: list[tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]] = field(default_factory=list)
    drawn: list[Path] = field(default_factory=list)  # overlays on disk
    seen: dict[bytes, str] = field(default_factory=dict)  # digests of pixels -> the first picture that has them
    # DICOM files with overlays of their frames
    sources: dict[Path, list[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]]] = field(default_factory=dict)


def keep(done: Session, picture: Picture, reading: Reading, out: Path | None, dicom: Path | None) -> None:
    """Draws what will be asked for, so that the picture itself need not stay in memory."""
    done.readings.append(reading)
    if picture.dicom is not None:
        done.sources.setdefault(picture.dicom, [])
    if out is None and dicom is None:
        return
    if reading.repeats is None:
        done.gallery.look(picture.pixels, reading)
    drawn = overlay(picture.pixels, reading) if reading.kind == "field" else None
    if out is not None and drawn is not None:
        file = out / f"overlay-{len(done.readings):04d}.png"
        out.mkdir(parents=True, exist_ok=True)
        with full_disk_is_named(file):
            Image.fromarray(drawn).save(file)
        done.drawn.append(file)
        if len(done.overlays) < IN_PAGE:
            done.overlays.append((picture.name, drawn))
    if picture.dicom is not None and dicom is not None and drawn is not None:
        done.sources[picture.dicom].append((picture.frame, drawn))


def write_report(out: Path, done: Session, slide: Slide, about: dict[str, Any]) -> list[Path]:
    montage = done.gallery.montage()
    more = len(done.drawn) - len(done.overlays)
    text = page(slide.told(), about, montage, done.overlays, done.failed, more)
    written = [
        write_atomically(out / "report.html", text.encode()),
        write_atomically(out / "cells.csv", csv_of(done.readings).encode()),
    ]
    if montage is not None:
        picture = io.BytesIO()
        Image.fromarray(montage).save(picture, "PNG")
        written.append(write_atomically(out / "montage.png", picture.getvalue()))
    return written + done.drawn


def write_dicom(out: Path, done: Session, slide: Slide, about: dict[str, Any]) -> list[Path]:
    from importlib.metadata import version

    from deploy.slide.dicom_report import Finding, overlay_capture, structured_report

    if not done.sources:
        raise BadStudy("--dicom writes results that refer to DICOM images, and none was given")
    v = slide.verdict
    estimate, low, high = (
        math.nan if x is None else x for x in (v.prevalence, v.low, v.high)
    )  # left out of the report
    rows = tuple(f"{what}: {said}" for what, said in rows_of(slide.told(), about))
    finding = Finding(v.counted, v.flagged, estimate, low, high, headline(slide.told()), about["title"], about["digest"],
                      version("hemofed"), NOTICE, (*slide.doubts, *slide.notes, *rows))  # fmt: skip
    written = [structured_report(list(done.sources), finding, out / "report.dcm")]
    for n, (source, frames) in enumerate(done.sources.items(), start=1):
        written += [
            overlay_capture(source, drawn, out / f"overlay-{n:04d}-{frame}.dcm", frame) for frame, drawn in frames
        ]
    return written


def notes_on(done: Session) -> list[str]:
    """What a reader of the result has to know, though it decides nothing: copies, and what could not be read."""
    again = [f"{r.name} shows the same as {r.repeats}, and is not counted again" for r in done.readings if r.repeats]
    if len(again) > MOST_NOTES:
        again = [*again[: MOST_NOTES - 1], f"and {len(again) - MOST_NOTES + 1} more pictures are there twice"]
    lost = len(done.failed)
    return again + (
        [f"{lost} of {lost + len(done.readings)} pictures could not be read: the result is without them"]
        if lost
        else []
    )


def csv_of(readings: list[Reading]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for reading in readings:
        for c in reading.cells:
            p = "" if c.probability is None else f"{c.probability:.6f}"
            counts = reading.repeats is None
            told = [
                c.kind,
                c.label or "",
                p,
                c.about or "",
                int(c.flagged and counts),
                int(c.counted and counts),
                c.why or "",
            ]
            rows.writerow([_plain(reading.name), *c.box, *told, _plain(reading.repeats or "")])
    return out.getvalue()


def _plain(name: str) -> str:
    """A spreadsheet must not take a file's name for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) and name != "-" else name
