"""What the page for the bedside asks for: a bundle's description, pictures read, counts judged.

Nothing is kept here and nothing is written: the page holds a slide's readings, and all statistics are computed here.
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

from deploy.bundle.ood_guard import ENOUGH as ENOUGH_CELLS
from deploy.bundle.operating_points import TINY, Point
from deploy.imaging.images import Picture, read_bytes
from deploy.inference.runtime import Runtime
from deploy.slide.html_report import headline, rows_of
from deploy.slide.prevalence import ABOVE, BELOW, ENOUGH, LINE, NOTICE
from deploy.slide.reader import Cell, Reader, Reading, Tally, slide_from
from pipeline.core.errors import BadData, HemofedError, Refused

DRAWN_BY_BROWSERS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM")
TONES = {ABOVE: "above", BELOW: "below"}
Told = dict[str, Any]
MOST = 10**9  # of anything that is counted


class Traits(BaseModel):
    """Of a picture's counted cells."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    n: int = Field(gt=0, le=MOST)
    mean: list[Annotated[float, Field(ge=-1e6, le=1e6)]]


class Counts(BaseModel):
    """Of a whole slide, at one operating point."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    counted: int = Field(ge=0, le=MOST)
    flagged: int = Field(ge=0, le=MOST)
    log_odds: float | None = None  # the default point
    found: int | None = Field(default=None, ge=0, le=MOST)
    excluded: dict[Annotated[str, Field(max_length=200)], Annotated[int, Field(ge=0, le=MOST)]] = {}
    traits: list[Traits] = []
    diameters: list[Annotated[float, Field(gt=0, le=1e4)]] = []  # of a red cell, in each field
    singles: int = Field(default=0, ge=0, le=MOST)  # pictures of one cell


@dataclass(frozen=True)
class Desk:
    runtime: Runtime
    most: int
    _one: threading.Lock = field(default_factory=threading.Lock)  # pictures are read one at a time
    over: threading.Event = field(default_factory=threading.Event)

    def about(self) -> Told:
        bundle, calibration = self.runtime.bundle, self.runtime.calibration
        default = calibration.point()
        return self.runtime.about() | {
            "positive": calibration.positive, "curve": [p.told() for p in calibration.ladder],
            "points": [p.told() for p in calibration.points], "default": default.told() if default else None,
            "line": LINE, "enough": ENOUGH, "notice": NOTICE, "most": self.most, "card": bundle.files["card.md"].decode(),
        }  # fmt: skip

    def read(self, data: bytes, name: str, drawn: bool) -> list[Told]:
        """Every picture in a file; one that cannot be read does not stop the others."""
        with self._one:
            reader = Reader(self.runtime, self.runtime.calibration.point())
            drawn = drawn or not data.startswith(DRAWN_BY_BROWSERS)
            found = []
            for picture in read_bytes(data, name):
                if self.over.is_set():
                    raise Refused("the service was ended; start it again")
                found.append(self._one_of(reader, picture, drawn))
        if all("error" in picture for picture in found):
            raise BadData(found[0]["error"])
        return found

    def _one_of(self, reader: Reader, picture: Picture, drawn: bool) -> Told:
        try:
            reading = reader.read(picture)
        except HemofedError as error:
            return {"path": picture.name, "error": str(error)}
        return {**told_of(reading, self.runtime), "image": inline(picture) if drawn else None}

    def verdict(self, counts: Counts) -> Told:
        if counts.flagged > counts.counted:
            raise BadData(f"{counts.flagged} flagged of {counts.counted} counted; flagged cells are counted ones")
        point = self._point(counts.log_odds)
        found = counts.counted if counts.found is None else counts.found
        tally = Tally(counts.counted, counts.flagged, found, counts.excluded, self._drift(counts.traits),
                      tuple(counts.diameters), singles=counts.singles, unfit=self.runtime.unfit)  # fmt: skip
        slide = slide_from(tally, point, self.runtime.calibration.positive).told()
        return {**slide, "headline": headline(slide), "rows": rows_of(slide, self.about()), "warnings": slide["doubts"],
                "tone": TONES.get(slide["verdict"], "open")}  # fmt: skip

    def _point(self, log_odds: float | None) -> Point | None:
        if log_odds is None:
            return self.runtime.calibration.point()
        found = next(
            (p for p in self.runtime.calibration.ladder if math.isclose(p.log_odds, log_odds, abs_tol=1e-9)), None
        )
        if found is None:
            raise BadData(f"no operating point at log-odds {log_odds:g}; take one of /api/about's curve")
        return found

    def _drift(self, traits: list[Traits]) -> float | None:
        """From means a picture, weighted: the same as from all cells at once."""
        reference = self.runtime.reference
        if reference is None or not traits:
            return None
        if any(len(one.mean) != len(reference.middle) for one in traits):
            raise BadData(f"traits must have {len(reference.middle)} numbers, as /api/read gives them")
        mean = np.average([one.mean for one in traits], 0, [one.n for one in traits])
        return reference.drift_of(mean) if sum(one.n for one in traits) >= ENOUGH_CELLS else None


def told_of(reading: Reading, runtime: Runtime) -> Told:
    """What `hemofed predict --json` tells, and what a page needs to decide anew at another point."""
    width, height = reading.size
    cells = [{**cell.told(), "log_odds": odds_of(cell, runtime)} for cell in reading.cells]
    seen = reading.traits
    traits = {"n": len(seen), "mean": seen.mean(0, dtype=np.float64).tolist()} if seen.size else None
    return {**reading.told(), "width": width, "height": height, "cells": cells, "traits": traits}


def odds_of(cell: Cell, runtime: Runtime) -> float | None:
    if cell.probability is None or runtime.positive is None:
        return None
    return math.log(max(cell.probability, TINY)) - math.log(max(1 - cell.probability, TINY))


def inline(picture: Picture) -> str:
    out = io.BytesIO()
    Image.fromarray(picture.pixels).save(out, "JPEG", quality=92, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
