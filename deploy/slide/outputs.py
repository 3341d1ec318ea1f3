"""Result files of a slide: HTML report, table of cells, overlays and montage, DICOM results."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deploy.imaging.input_image import InputImage
from deploy.inference.runtime import ModelInfo
from deploy.slide.html_report import render_page
from deploy.slide.image_result import ImageFailure, ImageResult
from deploy.slide.overlays import CellGallery, draw_overlay
from deploy.slide.slide_result import SlideResult
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


class SlideOutputs:
    """Draws each image at once, so that images do not stay in memory; writes the reports at the end."""

    def __init__(self, report_folder: Path | None, dicom_folder: Path | None) -> None:
        """A folder that is None is not written."""
        # files of another slide must not mix with those of this one
        for folder in filter(None, (report_folder, dicom_folder)):
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise StudyError(
                    f"{folder} is not an empty folder; choose another one for this slide, or remove the files of an interrupted call"
                )
        self.report_folder, self.dicom_folder = report_folder, dicom_folder
        self._gallery = CellGallery()
        self._num_images = 0
        self._page_overlays: list[tuple[str, NDArray[np.uint8]]] = []
        self._overlay_paths: list[Path] = []
        # DICOM file -> (frame number, overlay)
        self._dicom_overlays: dict[Path, list[tuple[int, NDArray[np.uint8]]]] = {}

    def add_image(self, image: InputImage, result: ImageResult) -> None:
        self._num_images += 1
        if image.dicom_path is not None:
            self._dicom_overlays.setdefault(image.dicom_path, [])
        if self.report_folder is None and self.dicom_folder is None:
            return
        if result.duplicate_of is None:
            self._gallery.add_cells(image.pixels, result)
        if result.kind == "field":
            self._add_overlay(image, draw_overlay(image.pixels, result))

    def _add_overlay(self, image: InputImage, overlay: NDArray[np.uint8]) -> None:
        if self.report_folder is not None:
            path = self.report_folder / f"overlay-{self._num_images:04d}.png"
            self.report_folder.mkdir(parents=True, exist_ok=True)
            with raise_no_space(path):
                Image.fromarray(overlay).save(path)
            self._overlay_paths.append(path)
            if len(self._page_overlays) < MAX_PAGE_OVERLAYS:
                self._page_overlays.append((image.name, overlay))
        if self.dicom_folder is not None and image.dicom_path is not None:
            self._dicom_overlays[image.dicom_path].append((image.frame_number, overlay))

    def write(
        self, slide: SlideResult, model: ModelInfo, images: Sequence[ImageResult], failures: Sequence[ImageFailure]
    ) -> list[Path]:
        """Returns the files of both folders."""
        return [*self._write_report(slide, model, images, failures), *self._write_dicom(slide, model)]

    def _write_report(
        self, slide: SlideResult, model: ModelInfo, images: Sequence[ImageResult], failures: Sequence[ImageFailure]
    ) -> list[Path]:
        if self.report_folder is None:
            return []
        montage = self._gallery.render_montage()
        html = render_page(
            slide=slide,
            model=model,
            montage=montage,
            overlays=self._page_overlays,
            failures=failures,
            num_more_overlays=len(self._overlay_paths) - len(self._page_overlays),
        )
        paths = [
            write_atomically(self.report_folder / "report.html", html.encode()),
            write_atomically(self.report_folder / "cells.csv", cells_to_csv(images).encode()),
        ]
        if montage is not None:
            buffer = io.BytesIO()
            Image.fromarray(montage).save(buffer, "PNG")
            paths.append(write_atomically(self.report_folder / "montage.png", buffer.getvalue()))
        return paths + self._overlay_paths

    def _write_dicom(self, slide: SlideResult, model: ModelInfo) -> list[Path]:
        if self.dicom_folder is None:
            return []
        from deploy.slide.dicom_report import write_overlay_capture, write_structured_report

        if not self._dicom_overlays:
            raise StudyError("--dicom writes results that refer to DICOM images, and none was given; leave it out")
        paths = [write_structured_report(list(self._dicom_overlays), slide, model, self.dicom_folder / "report.dcm")]
        for n, (source, frames) in enumerate(self._dicom_overlays.items(), start=1):
            for frame_number, overlay in frames:
                path = self.dicom_folder / f"overlay-{n:04d}-{frame_number}.dcm"
                paths.append(write_overlay_capture(source, overlay, path, frame_number))
        return paths


def cells_to_csv(image_results: Sequence[ImageResult]) -> str:
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
