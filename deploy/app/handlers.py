"""Handlers of the edge app's API: describe the model, read images, compute a slide's result from their summaries.

They are stateless and write nothing: the page holds the images' summaries and hands them back, and the slide's result
comes from the same `SlideSession` as that of `hemofed predict`.
"""

from __future__ import annotations

import base64
import io
import math
import threading
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.bundle.operating_points import MIN_PROBABILITY, OperatingPoint
from deploy.imaging.images import read_image_bytes
from deploy.imaging.input_image import InputImage
from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import CellResult, ImageFailure, ImageResult, ImageSummary
from deploy.slide.json_format import FORMAT_VERSION
from deploy.slide.reader import SlideReader
from deploy.slide.session import SlideSession
from deploy.slide.slide_text import build_rows, format_headline, verdict_tone
from deploy.slide.verdict import RECOMMENDED_CELLS, SUSPICION_THRESHOLD
from pipeline.core.errors import DataError, HemofedError, IncompatibleStudyError

BROWSER_IMAGE_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM")
JsonDict = dict[str, Any]
MAX_IMAGES = 20_000  # of a slide


class SlideRequest(BaseModel):
    """The images of a slide, as /api/images summarized them, with their flagged cells at one operating point."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    images: list[ImageSummary] = Field(max_length=MAX_IMAGES)
    failures: list[ImageFailure] = Field(default=[], max_length=MAX_IMAGES)
    log_odds: float | None = None  # of the operating point; None: the default one


@dataclass(frozen=True)
class EdgeHandlers:
    runtime: BundleRuntime
    max_bytes: int  # of one image file
    _read_lock: threading.Lock = field(default_factory=threading.Lock)  # one file at a time
    shutdown_event: threading.Event = field(default_factory=threading.Event)

    def describe_model(self) -> JsonDict:
        bundle, calibration = self.runtime.bundle, self.runtime.calibration
        default_point = calibration.find_point()
        return self.runtime.model_info.model_dump(mode="json") | {
            "format": FORMAT_VERSION,
            "positive_class": calibration.positive_class,
            "curve": [p.to_dict() for p in calibration.sorted_points],
            "operating_points": [p.to_dict() for p in calibration.operating_points],
            "default_point": default_point.to_dict() if default_point else None,
            "suspicion_threshold": SUSPICION_THRESHOLD,
            "recommended_cells": RECOMMENDED_CELLS,
            "notice": RESEARCH_USE_NOTICE,
            "max_bytes": self.max_bytes,
            "card": bundle.files["card.md"].decode(),
        }

    def read_images(self, data: bytes, name: str, include_pixels: bool) -> list[JsonDict]:
        """Every image in a file; an unreadable frame gives an error entry. Raises if all are unreadable."""
        with self._read_lock:
            reader = SlideReader(self.runtime, self.runtime.calibration.find_point())
            include_pixels = include_pixels or not data.startswith(BROWSER_IMAGE_MAGICS)
            results = []
            for input_image in read_image_bytes(data, name):
                if self.shutdown_event.is_set():
                    raise IncompatibleStudyError("the service was stopped; start it again")
                results.append(self._read_image(reader, input_image, include_pixels))
        if all("error" in result for result in results):
            raise DataError(results[0]["error"])
        return results

    def _read_image(self, reader: SlideReader, input_image: InputImage, include_pixels: bool) -> JsonDict:
        try:
            image_result = reader.read_image(input_image)
        except HemofedError as error:
            return {"path": input_image.name, "error": str(error)}
        return {
            **image_result_to_dict(image_result, self.runtime),
            "data_url": encode_data_url(input_image) if include_pixels else None,
        }

    def assess_slide(self, request: SlideRequest) -> JsonDict:
        session = SlideSession(self.runtime, self._find_operating_point(request.log_odds))
        duplicate_of = [session.add_image(image) for image in request.images]
        for failure in request.failures:
            session.add_failure(failure)
        slide = session.result()
        return {
            **slide.to_dict(),
            "duplicate_of": duplicate_of,
            "headline": format_headline(slide),
            "rows": build_rows(slide, self.runtime.model_info),
            "tone": verdict_tone(slide),
        }

    def _find_operating_point(self, log_odds: float | None) -> OperatingPoint | None:
        if log_odds is None:
            return self.runtime.calibration.find_point()
        operating_point = next(
            (p for p in self.runtime.calibration.sorted_points if math.isclose(p.log_odds, log_odds, abs_tol=1e-9)),
            None,
        )
        if operating_point is None:
            raise DataError(f"no operating point at log-odds {log_odds:g}; take one of the curve in /api/model")
        return operating_point


def image_result_to_dict(image_result: ImageResult, runtime: BundleRuntime) -> JsonDict:
    """The record of `hemofed predict --json`, plus what the page needs for another operating point."""
    width, height = image_result.image_size
    cells = [
        {**cell.to_record().model_dump(mode="json", by_alias=True), "log_odds": cell_log_odds(cell, runtime)}
        for cell in image_result.cells
    ]
    summary = image_result.summarize().model_dump(mode="json")
    return {**image_result.to_dict(), "width": width, "height": height, "cells": cells, "summary": summary}


def cell_log_odds(cell: CellResult, runtime: BundleRuntime) -> float | None:
    if cell.probability is None or runtime.positive_index is None:
        return None
    return math.log(max(cell.probability, MIN_PROBABILITY)) - math.log(max(1 - cell.probability, MIN_PROBABILITY))


def encode_data_url(input_image: InputImage) -> str:
    buffer = io.BytesIO()
    Image.fromarray(input_image.pixels).save(buffer, "JPEG", quality=92, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
