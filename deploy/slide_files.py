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

from deploy.drawing import Gallery, overlay
from deploy.pictures import Picture
from deploy.reading import Reading, Slide
from deploy.slide import NOTICE
from deploy.slide_page import page, rows_of
from pipeline.errors import BadStudy
from pipeline.files import full_disk_is_named, write_atomically

COLUMNS = ("path", "x0", "y0", "x1", "y1", "kind", "class", "probability", "flagged", "counted", "why")
IN_PAGE = 12  # overlays


@dataclass
class Session:
    """What has been read so far."""

    readings: list[Reading] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    gallery: Gallery = field(default_factory=Gallery)
    overlays: list[tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]] = field(default_factory=list)
    drawn: list[Path] = field(default_factory=list)  # overlays on disk
    seen: dict[bytes, str] = field(default_factory=dict)  # digests of pixels -> the first picture that has them
    sources: dict[Path, list[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]]] = field(default_factory=dict)  # DICOM


def keep(done: Session, picture: Picture, reading: Reading, out: Path | None, dicom: Path | None) -> None:
    """Draws what will be asked for, so that the picture itself need not stay in memory."""
    done.readings.append(reading)
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
    if picture.dicom is not None:
        shown = done.sources.setdefault(picture.dicom, [])
        if drawn is not None:
            shown.append((picture.frame, drawn))


def write_report(out: Path, done: Session, slide: Slide, about: dict[str, Any]) -> list[Path]:
    montage = done.gallery.montage()
    text = page(slide.told(), about, montage, done.overlays, done.failed)
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

    from deploy.dicom_result import Finding, overlay_capture, structured_report

    if not done.sources:
        raise BadStudy("--dicom writes results that refer to DICOM images, and none was given")
    v = slide.verdict
    estimate, low, high = (
        math.nan if x is None else x for x in (v.prevalence, v.low, v.high)
    )  # left out of the report
    rows = tuple(f"{what}: {said}" for what, said in rows_of(slide.told(), about))
    finding = Finding(v.counted, v.flagged, estimate, low, high, f"{v.verdict}: {v.why}", about["title"], about["digest"],
                      version("hemofed"), NOTICE, (*slide.doubts, *repeats(done.readings), *rows))  # fmt: skip
    written = [structured_report(list(done.sources), finding, out / "report.dcm")]
    for n, (source, frames) in enumerate(done.sources.items(), start=1):
        written += [
            overlay_capture(source, drawn, out / f"overlay-{n:04d}-{frame}.dcm", frame) for frame, drawn in frames
        ]
    return written


def repeats(readings: list[Reading]) -> list[str]:
    again = [f"{r.name} shows the same as {r.repeats}, and is not counted again" for r in readings if r.repeats]
    return again if len(again) < 4 else [*again[:3], f"and {len(again) - 3} more pictures are there twice"]


def csv_of(readings: list[Reading]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for reading in readings:
        for c in reading.cells:
            p = "" if c.probability is None else f"{c.probability:.6f}"
            rows.writerow(
                [_plain(reading.name), *c.box, c.kind, c.label or "", p, int(c.flagged), int(c.counted), c.why or ""]
            )
    return out.getvalue()


def _plain(name: str) -> str:
    """A spreadsheet must not take a file's name for a formula."""
    return f"'{name}" if name[:1] in "=+-@" and name != "-" else name
