"""Handlers of the edge app's API: describe the model, read images, estimate the prevalence from counts.

They are stateless and write nothing: the page holds the images' results, the handlers compute all statistics.
"""

from __future__ import annotations

import base64
import io
import math
import threading
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from deploy.bundle.ood_guard import MIN_SAMPLES
from deploy.bundle.operating_points import MIN_PROBABILITY, OperatingPoint
from deploy.imaging.images import InputImage, read_image_bytes
from deploy.inference.runtime import BundleRuntime
from deploy.slide.html_report import build_rows, format_headline
from deploy.slide.reader import CellResult, ImageResult, SlideCounts, SlideReader, build_slide_result
from deploy.slide.verdict import (
    RECOMMENDED_CELLS,
    RESEARCH_USE_NOTICE,
    SUSPICION_THRESHOLD,
    VERDICT_ABOVE,
    VERDICT_BELOW,
)
from pipeline.core.errors import DataError, HemofedError, IncompatibleStudyError

BROWSER_IMAGE_MAGICS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM")
VERDICT_TONES = {VERDICT_ABOVE: "above", VERDICT_BELOW: "below"}
JsonDict = dict[str, Any]
MAX_COUNT = 10**9


class FeatureMean(BaseModel):
    """Mean of the whitened features of an image's counted cells."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    n: int = Field(gt=0, le=MAX_COUNT)
    mean: list[Annotated[float, Field(ge=-1e6, le=1e6)]]


class SlideCountsRequest(BaseModel):
    """Counts over all images of a slide, at one operating point."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_counted: int = Field(ge=0, le=MAX_COUNT)
    num_flagged: int = Field(ge=0, le=MAX_COUNT)
    log_odds: float | None = None  # of the operating point; None: the default one
    num_found: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    excluded: dict[Annotated[str, Field(max_length=200)], Annotated[int, Field(ge=0, le=MAX_COUNT)]] = {}
    feature_means: list[FeatureMean] = []
    rbc_diameters_px: list[Annotated[float, Field(gt=0, le=1e4)]] = []  # of a red cell, in each field
    num_single_cells: int = Field(default=0, ge=0, le=MAX_COUNT)  # images of one cell


@dataclass(frozen=True)
class EdgeHandlers:
    runtime: BundleRuntime
    max_bytes: int  # of one image file
    _read_lock: threading.Lock = field(default_factory=threading.Lock)  # one file at a time
    shutdown_event: threading.Event = field(default_factory=threading.Event)

    def describe_model(self) -> JsonDict:
        bundle, calibration = self.runtime.bundle, self.runtime.calibration
        default_point = calibration.find_point()
        return self.runtime.describe_model() | {
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

    def assess_counts(self, request: SlideCountsRequest) -> JsonDict:
        if request.num_flagged > request.num_counted:
            raise DataError(
                f"{request.num_flagged} flagged of {request.num_counted} counted; flagged cells must be among the counted"
            )
        operating_point = self._find_operating_point(request.log_odds)
        num_found = request.num_counted if request.num_found is None else request.num_found
        slide_counts = SlideCounts(
            request.num_counted,
            request.num_flagged,
            num_found,
            request.excluded,
            self._compute_drift(request.feature_means),
            tuple(request.rbc_diameters_px),
            num_single_cells=request.num_single_cells,
            unfit_reason=self.runtime.unfit_reason,
        )
        slide_record = build_slide_result(
            slide_counts, operating_point, self.runtime.calibration.positive_class
        ).to_dict()
        return {
            **slide_record,
            "headline": format_headline(slide_record),
            "rows": build_rows(slide_record, self.describe_model()),
            "warnings": slide_record["reliability_warnings"],
            "tone": VERDICT_TONES.get(slide_record["verdict"], "open"),
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

    def _compute_drift(self, feature_means: list[FeatureMean]) -> float | None:
        """The slide's drift from the images' means, weighted by cells; None for fewer than MIN_SAMPLES cells."""
        ood_reference = self.runtime.ood_reference
        if ood_reference is None or not feature_means:
            return None
        if any(len(entry.mean) != len(ood_reference.feature_mean) for entry in feature_means):
            raise DataError(
                f"feature_means must have {len(ood_reference.feature_mean)} numbers each; send those that /api/images gives"
            )
        mean = np.average([entry.mean for entry in feature_means], 0, [entry.n for entry in feature_means])
        return ood_reference.drift_of_mean(mean) if sum(entry.n for entry in feature_means) >= MIN_SAMPLES else None


def image_result_to_dict(image_result: ImageResult, runtime: BundleRuntime) -> JsonDict:
    """The record of `hemofed predict --json`, plus what the page needs for another operating point."""
    width, height = image_result.image_size
    cells = [{**cell.to_dict(), "log_odds": cell_log_odds(cell, runtime)} for cell in image_result.cells]
    features = image_result.features
    feature_mean = {"n": len(features), "mean": features.mean(0, dtype=np.float64).tolist()} if features.size else None
    return {**image_result.to_dict(), "width": width, "height": height, "cells": cells, "feature_mean": feature_mean}


def cell_log_odds(cell: CellResult, runtime: BundleRuntime) -> float | None:
    if cell.probability is None or runtime.positive_index is None:
        return None
    return math.log(max(cell.probability, MIN_PROBABILITY)) - math.log(max(1 - cell.probability, MIN_PROBABILITY))


def encode_data_url(input_image: InputImage) -> str:
    buffer = io.BytesIO()
    Image.fromarray(input_image.pixels).save(buffer, "JPEG", quality=92, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
