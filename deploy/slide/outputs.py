"""Result files of a slide: HTML report, table of cells, overlays and montage, DICOM results."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deploy.imaging.images import InputImage
from deploy.slide.html_report import build_rows, format_headline, render_page
from deploy.slide.overlays import CellGallery, draw_overlay
from deploy.slide.reader import ImageResult, SlideResult
from deploy.slide.verdict import RESEARCH_USE_NOTICE
from pipeline.core.errors import StudyError
from pipeline.core.files import raise_no_space, write_atomically

CSV_COLUMNS = (
    "path",
    "x0",
    "y0",
    "x1",
    "y1",
    "kind",
    "class",
    "probability",
    "probability_class",
    "is_flagged",
    "is_counted",
    "exclusion_reason",
    "duplicate_of",
)
MAX_PAGE_OVERLAYS = 12  # overlays inside report.html
MAX_DUPLICATE_NOTES = 3  # duplicate images named in the notes


@dataclass
class PredictSession:
    """Results of the images read so far."""

    image_results: list[ImageResult] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    gallery: CellGallery = field(default_factory=CellGallery)
    overlays: list[tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]] = field(default_factory=list)
    overlay_paths: list[Path] = field(default_factory=list)  # overlays on disk
    first_by_digest: dict[bytes, str] = field(default_factory=dict)  # digest of pixels -> first image with them
    # DICOM file -> (frame number, overlay)
    dicom_overlays: dict[Path, list[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]]] = field(default_factory=dict)


def record_image(
    session: PredictSession,
    input_image: InputImage,
    image_result: ImageResult,
    output_folder: Path | None,
    dicom_folder: Path | None,
) -> None:
    """Draws the overlay and tiles at once, so that the image does not stay in memory."""
    session.image_results.append(image_result)
    if input_image.dicom_path is not None:
        session.dicom_overlays.setdefault(input_image.dicom_path, [])
    if output_folder is None and dicom_folder is None:
        return
    if image_result.duplicate_of is None:
        session.gallery.add_cells(input_image.pixels, image_result)
    overlay_pixels = draw_overlay(input_image.pixels, image_result) if image_result.kind == "field" else None
    if output_folder is not None and overlay_pixels is not None:
        overlay_path = output_folder / f"overlay-{len(session.image_results):04d}.png"
        output_folder.mkdir(parents=True, exist_ok=True)
        with raise_no_space(overlay_path):
            Image.fromarray(overlay_pixels).save(overlay_path)
        session.overlay_paths.append(overlay_path)
        if len(session.overlays) < MAX_PAGE_OVERLAYS:
            session.overlays.append((input_image.name, overlay_pixels))
    if input_image.dicom_path is not None and dicom_folder is not None and overlay_pixels is not None:
        session.dicom_overlays[input_image.dicom_path].append((input_image.frame_number, overlay_pixels))


def write_report(
    output_folder: Path, session: PredictSession, slide_result: SlideResult, model_info: dict[str, Any]
) -> list[Path]:
    montage = session.gallery.render_montage()
    num_more_overlays = len(session.overlay_paths) - len(session.overlays)
    html = render_page(
        slide_result.to_dict(), model_info, montage, session.overlays, session.failures, num_more_overlays
    )
    paths = [
        write_atomically(output_folder / "report.html", html.encode()),
        write_atomically(output_folder / "cells.csv", cells_to_csv(session.image_results).encode()),
    ]
    if montage is not None:
        buffer = io.BytesIO()
        Image.fromarray(montage).save(buffer, "PNG")
        paths.append(write_atomically(output_folder / "montage.png", buffer.getvalue()))
    return paths + session.overlay_paths


def write_dicom_results(
    output_folder: Path, session: PredictSession, slide_result: SlideResult, model_info: dict[str, Any]
) -> list[Path]:
    from importlib.metadata import version

    from deploy.slide.dicom_report import SlideFinding, write_overlay_capture, write_structured_report

    if not session.dicom_overlays:
        raise StudyError("--dicom writes results that refer to DICOM images, and none was given; leave it out")
    estimate_record = slide_result.estimate
    prevalence, low, high = (
        math.nan if x is None else x
        for x in (estimate_record.prevalence, estimate_record.prevalence_low, estimate_record.prevalence_high)
    )  # the report leaves NaN out
    rows = tuple(f"{label}: {value}" for label, value in build_rows(slide_result.to_dict(), model_info))
    finding = SlideFinding(
        num_cells=estimate_record.num_counted,
        num_schistocytes=estimate_record.num_flagged,
        prevalence=prevalence,
        prevalence_low=low,
        prevalence_high=high,
        verdict=format_headline(slide_result.to_dict()),
        model=model_info["title"],
        digest=model_info["digest"],
        software_version=version("hemofed"),
        notice=RESEARCH_USE_NOTICE,
        comments=(*slide_result.reliability_warnings, *slide_result.notes, *rows),
    )
    paths = [write_structured_report(list(session.dicom_overlays), finding, output_folder / "report.dcm")]
    for n, (source, frames) in enumerate(session.dicom_overlays.items(), start=1):
        paths += [
            write_overlay_capture(
                source, overlay_pixels, output_folder / f"overlay-{n:04d}-{frame_number}.dcm", frame_number
            )
            for frame_number, overlay_pixels in frames
        ]
    return paths


def session_notes(session: PredictSession) -> list[str]:
    """Notes that do not affect the verdict: duplicate images, and images that could not be read."""
    duplicates = [
        f"{r.name} shows the same image as {r.duplicate_of} and is not counted again"
        for r in session.image_results
        if r.duplicate_of
    ]
    if len(duplicates) > MAX_DUPLICATE_NOTES:
        duplicates = [
            *duplicates[: MAX_DUPLICATE_NOTES - 1],
            f"{len(duplicates) - MAX_DUPLICATE_NOTES + 1} more images are duplicates",
        ]
    num_failed = len(session.failures)
    return duplicates + (
        [
            f"{num_failed} of {num_failed + len(session.image_results)} images could not be read: the result does not include them"
        ]
        if num_failed
        else []
    )


def cells_to_csv(image_results: list[ImageResult]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for image_result in image_results:
        for c in image_result.cells:
            p = "" if c.probability is None else f"{c.probability:.6f}"
            is_unique = image_result.duplicate_of is None
            values = [
                c.kind,
                c.label or "",
                p,
                c.probability_class or "",
                int(c.is_flagged and is_unique),
                int(c.is_counted and is_unique),
                c.exclusion_reason or "",
            ]
            writer.writerow(
                [_escape_formula(image_result.name), *c.box, *values, _escape_formula(image_result.duplicate_of or "")]
            )
    return buffer.getvalue()


def _escape_formula(name: str) -> str:
    """Keeps a spreadsheet from taking a file name for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) and name != "-" else name
