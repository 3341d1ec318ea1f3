"""Pictures -> what the model says about them: single cells, and whole fields cut into cells first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from deploy.bundle.ood_guard import DRIFTED, OUTSIDE
from deploy.bundle.operating_points import Point
from deploy.inference.resize import Images, resized
from deploy.inference.runtime import Answers, Runtime
from deploy.slide.prevalence import ENOUGH, LINE, NOTICE, Verdict, judge
from pipeline.core.errors import BadData, Refused

if TYPE_CHECKING:
    from deploy.bundle.bundle import Bundle
    from deploy.imaging.images import Picture
    from deploy.segmentation.find_cells import Blob

Box = tuple[int, int, int, int]
How = Literal["auto", "cell", "field"]
ALIKE = (0.8, 1.25)  # a field whose cells are so much larger or smaller is taken to have the training fields' scale
WHOLE = 2.0  # an image this many windows high and wide is a field
MANY = 0.2  # of red cells that are not answered for: a few are on every slide
NOT_COUNTED = {
    "white": "white cell",
    "platelet": "platelet",
    "clump": "cells that could not be separated",
    "border": "cut by the edge of the picture",
    "debris": "no cell",
}


@dataclass(frozen=True)
class Cell:
    box: Box  # x0, y0, x1, y1 in pixels of the picture
    kind: str  # red, or what else it was taken for
    label: str | None  # the class; None for what the model was not asked about
    probability: float | None  # of the class that matters, or else of `label`
    flagged: bool
    counted: bool
    why: str | None  # it is not counted
    about: str | None = None  # the class that `probability` is of

    def told(self) -> dict[str, Any]:
        found = asdict(self)
        return {
            "box": list(found.pop("box")),
            "class": found.pop("label"),
            "probability_of": found.pop("about"),
            **found,
        }


@dataclass(frozen=True)
class Reading:
    """One picture. A single cell has a box as large as its picture."""

    name: str
    kind: Literal["cell", "field"]
    size: tuple[int, int]  # width, height
    cells: tuple[Cell, ...]
    traits: NDArray[np.float32] = field(repr=False)  # of the counted ones
    diameter: float | None = None  # of a red cell, in pixels
    probabilities: tuple[dict[str, float], ...] = ()  # of a single cell, by class
    repeats: str | None = None  # the picture that shows the same: its cells count once
    measured: float | None = None  # the diameter as this field tells it, whatever was given

    def told(self) -> dict[str, Any]:
        if self.kind == "cell":
            (cell,) = self.cells
            one = cell.told()
            return {"path": self.name, "kind": "cell", "repeats": self.repeats, **{k: one[k] for k in ("class", "probability", "probability_of", "flagged", "counted", "why")},
                    "probabilities": self.probabilities[0]}  # fmt: skip
        counts = Counter(cell.label for cell in self.cells if cell.counted)
        return {
            "path": self.name,
            "kind": "field",
            "repeats": self.repeats,
            "size": list(self.size),
            "diameter": self.diameter,
            "counts": {str(label): n for label, n in sorted(counts.items(), key=str)},
            "excluded": excluded([self]),
            "cells": [cell.told() for cell in self.cells],
        }


@dataclass(frozen=True)
class Tally:
    """What all pictures of one slide have shown."""

    counted: int
    flagged: int
    found: int  # cells and other things
    excluded: Mapping[str, int]
    drift: float | None
    sizes: tuple[float, ...] = ()  # of a red cell, in each field
    measured: tuple[float, ...] = ()  # where a size was given: what the fields themselves tell
    singles: int = 0  # pictures of one cell among those counted
    unfit: str | None = None  # what this lab found out about the model


@dataclass(frozen=True)
class Slide:
    """All pictures of one slide together."""

    verdict: Verdict
    point: Point | None
    found: int  # cells and other things
    excluded: dict[str, int]
    drift: float | None
    positive: str | None
    doubts: tuple[str, ...] = ()  # with any, nothing is decided
    notes: tuple[str, ...] = ()  # what a reader has to know besides

    def told(self) -> dict[str, Any]:
        drifted = self.drift is not None and self.drift > DRIFTED
        return {**self.verdict.told(), "line": LINE, "found": self.found, "excluded": self.excluded, "positive": self.positive,
                "operating_point": self.point.told() if self.point else None, "drift": self.drift, "drifted": drifted,
                "doubts": list(self.doubts), "notes": list(self.notes), "notice": NOTICE}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    runtime: Runtime
    point: Point | None
    how: How = "auto"
    diameter: float | None = None  # pixels of a red cell in these fields, if known

    def shows_field(self, picture: Picture) -> bool:
        return self.how == "field" or (self.how == "auto" and shows_field(self.runtime.bundle, picture))

    def read(self, picture: Picture) -> Reading:
        return self.field(picture) if self.shows_field(picture) else self.cells([picture])[0]

    def cells(self, pictures: Sequence[Picture]) -> list[Reading]:
        """Single cells, all at once: some models see colours by those of all of them."""
        manifest = self.runtime.bundle.manifest
        small = [resized(picture.pixels[None], manifest.size, manifest.resize) for picture in pictures]
        answers = self.runtime.answer(np.concatenate([*small, np.zeros((0, *manifest.size, 3), np.uint8)]))
        boxes: list[Box] = [(0, 0, p.pixels.shape[1], p.pixels.shape[0]) for p in pictures]
        found = []
        for n, (picture, cell) in enumerate(zip(pictures, self._judged(boxes, answers), strict=True)):
            share = dict(zip(self.runtime.classes, map(float, answers.probabilities[n]), strict=True))
            traits = answers.traits[n : n + 1] if cell.counted else answers.traits[:0]
            found.append(Reading(picture.name, "cell", cell.box[2:], (cell,), traits, None, (share,)))
        return found

    def field(self, picture: Picture) -> Reading:
        from deploy.segmentation.find_cells import find_cells

        manifest = self.runtime.bundle.manifest
        if manifest.window is None or manifest.diameter is None:
            raise Refused(
                f"{manifest.name} was trained on single images, and how large a cell is in a field is not known; cut cells out "
                "first, or export with --window and --diameter"
            )
        image = picture.pixels
        found = find_cells(image, self.diameter)
        diameter = found.diameter or manifest.diameter
        low, high = ALIKE
        if self.diameter is None and low < diameter / manifest.diameter < high:
            diameter = manifest.diameter
        red = [blob for blob in found.blobs if blob.kind == "red"]
        answers = self.runtime.answer(cut(image, [b.centre for b in red], round(manifest.window * diameter)))
        judged = iter(self._judged([b.box for b in red], answers))
        cells = tuple(next(judged) if blob.kind == "red" else _set_apart(blob) for blob in found.blobs)
        kept = np.array([why is None for why in answers.refused], bool)
        height, width = image.shape[:2]
        traits = answers.traits[kept]
        return Reading(
            picture.name, "field", (width, height), cells, traits, float(diameter), measured=found.measured or None
        )

    def _judged(self, boxes: Sequence[Box], answers: Answers) -> Iterator[Cell]:
        runtime = self.runtime
        flags = runtime.flagged(answers.probabilities, self.point)
        for box, p, flag, why in zip(boxes, answers.probabilities, flags, answers.refused, strict=True):
            best = _best(p, runtime.positive, bool(flag), self.point is not None)
            about = best if runtime.positive is None else runtime.positive
            told = flag and why is None
            names = runtime.classes
            yield Cell(box, "red", names[best], float(p[about]), bool(told), why is None, why, names[about])


def shows_field(bundle: Bundle, picture: Picture) -> bool:
    """A picture so large is no single cell."""
    window, known = bundle.manifest.window, bundle.manifest.diameter
    return window is not None and known is not None and min(picture.pixels.shape[:2]) >= WHOLE * window * known


def cutting(bundle: Bundle) -> str:
    """How a single cell has to be cut out to look as the training cells did."""
    window, known = bundle.manifest.window, bundle.manifest.diameter
    if window is None or known is None:
        return f"as the study's images, {bundle.manifest.size[0]} x {bundle.manifest.size[1]} pixels"
    side = round(window * known)
    return (
        f"a square of {window:.2f} cell diameters about its middle: {side} pixels where a red cell measures {known:.0f}"
    )


def _best(p: NDArray[np.float32], positive: int | None, flagged: bool, decides: bool) -> int:
    """The class that is named: by the operating point where there is one, else the likeliest."""
    if positive is None or not decides:
        return int(p.argmax())
    others = np.delete(np.arange(len(p)), positive)
    return positive if flagged else int(others[p[others].argmax()])


def _set_apart(blob: Blob) -> Cell:
    return Cell(blob.box, blob.kind, None, None, False, False, NOT_COUNTED[blob.kind])


def cut(image: NDArray[np.uint8], centres: Sequence[tuple[float, float]], side: int) -> Images:
    """(n, side, side, 3) about the centres, mirrored at the border, as training cells were."""
    half = side // 2
    if not centres:
        return np.zeros((0, side, side, 3), np.uint8)
    if min(image.shape[:2]) < 2:
        raise BadData("a field of one pixel's width holds no cells")
    padded = np.pad(image, ((half, side), (half, side), (0, 0)), mode="reflect")
    return np.stack([padded[round(y) : round(y) + side, round(x) : round(x) + side] for x, y in centres])


def excluded(readings: Sequence[Reading]) -> dict[str, int]:
    """How many were not counted, by reason; an image's own details are left to the list of cells."""
    reasons = Counter((c.why or "").partition(":")[0] for r in readings for c in r.cells if not c.counted)
    return dict(sorted(reasons.items(), key=lambda item: -item[1]))


def slide_of(readings: Sequence[Reading], runtime: Runtime, point: Point | None, notes: Sequence[str] = ()) -> Slide:
    once = [reading for reading in readings if reading.repeats is None]
    cells = [cell for reading in once for cell in reading.cells]
    counted = [cell for cell in cells if cell.counted]
    traits = [r.traits for r in once if len(r.traits)]
    shown = [r for r in once if r.diameter is not None and r.cells]
    tally = Tally(
        counted=len(counted),
        flagged=sum(cell.flagged for cell in counted),
        found=len(cells),
        excluded=excluded(once),
        drift=runtime.reference.drift(np.concatenate(traits)) if runtime.reference and traits else None,
        sizes=tuple(r.diameter for r in shown if r.diameter is not None),
        measured=tuple(r.measured for r in shown if r.measured is not None),
        singles=sum(r.kind == "cell" for r in once),
        unfit=runtime.unfit,
    )
    return slide_from(tally, point, runtime.calibration.positive, notes)


def slide_from(tally: Tally, point: Point | None, positive: str | None, notes: Sequence[str] = ()) -> Slide:
    doubts = tuple(doubts_about(tally))
    verdict = judge(tally.counted, tally.flagged, point, doubts)
    return Slide(verdict, point, tally.found, dict(tally.excluded), tally.drift, positive, doubts, tuple(notes))


def doubts_about(tally: Tally) -> Iterator[str]:
    """Why the model's rates may not hold on this slide."""
    if tally.unfit:
        yield f"{tally.unfit}: do not use this model here, or measure it anew (`hemofed edge verify`)"
    unlike, joined = (tally.excluded.get(why, 0) for why in (OUTSIDE, NOT_COUNTED["clump"]))
    if unlike > MANY * (unlike + tally.counted):
        yield (
            f"{unlike:,} of {unlike + tally.counted:,} red cells look unlike those the model was validated on and are not counted: check "
            "stain, focus, light and magnification"
        )
    if joined > MANY * (joined + tally.counted):
        yield (
            f"{joined:,} heaps of cells could not be separated, beside {tally.counted:,} single ones: the fields are too crowded; "
            "take them where cells lie apart"
        )
    if tally.drift is not None and tally.drift > DRIFTED:
        yield (
            "taken together, the counted cells look unlike those the model was validated on: check stain, focus, light and "
            "magnification, or measure the model here (`hemofed edge verify`)"
        )
    if tally.sizes and max(tally.sizes) > 1.5 * min(tally.sizes):
        yield "the fields differ in magnification: give those of one microscope setting, or say --diameter"
    if tally.measured and not ALIKE[0] < median(tally.measured) / median(tally.sizes) < ALIKE[1]:
        yield (
            f"the cells measure about {median(tally.measured):.0f} pixels, not {median(tally.sizes):.0f} as given: leave --diameter "
            "out, or give the right one"
        )
    if 0 < tally.singles < ENOUGH:
        yield f"pictures of {tally.singles:,} single cells may have been picked: give whole fields, or all cells of a slide"
    if not tally.found:
        yield "no cell was found: is it a smear, in focus and evenly lit?"
