"""Pictures -> what the model says about them: single cells, and whole fields cut into cells first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from deploy.bundle.crop import is_field_image
from deploy.bundle.ood_guard import MAX_DRIFT, OUT_OF_DISTRIBUTION
from deploy.bundle.operating_points import OperatingPoint
from deploy.inference.resize import ImageBatch, resize_images
from deploy.inference.runtime import BundleRuntime, Predictions
from deploy.slide.prevalence import (
    RECOMMENDED_CELLS,
    RESEARCH_USE_NOTICE,
    SUSPICION_THRESHOLD,
    PrevalenceEstimate,
    assess_prevalence,
)
from pipeline.core.errors import DataError, IncompatibleStudyError

if TYPE_CHECKING:
    from deploy.imaging.images import InputImage
    from deploy.segmentation.find_cells import CellRegion

BoundingBox = tuple[int, int, int, int]
InputType = Literal["auto", "cell", "field"]
SCALE_TOLERANCE = (
    0.8,
    1.25,
)  # a field whose cells are so much larger or smaller is taken to have the training fields' scale
MAX_UNCOUNTED_FRACTION = 0.2  # of red cells that are not answered for: a few are on every slide
EXCLUSION_REASONS = {
    "white": "white cell",
    "platelet": "platelet",
    "clump": "cells that could not be separated",
    "border": "cut by the edge of the picture",
    "debris": "no cell",
}


@dataclass(frozen=True)
class CellResult:
    box: BoundingBox  # x0, y0, x1, y1 in pixels of the picture
    kind: str  # red, or what else it was taken for
    label: str | None  # the class; None for what the model was not asked about
    probability: float | None  # of the class that matters, or else of `label`
    is_flagged: bool
    is_counted: bool
    exclusion_reason: str | None  # it is not counted
    probability_class: str | None = None  # the class that `probability` is of

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {
            "box": list(fields.pop("box")),
            "class": fields.pop("label"),
            "probability_of": fields.pop("probability_class"),
            **fields,
        }


@dataclass(frozen=True)
class ImageResult:
    """One picture. A single cell has a box as large as its picture."""

    name: str
    kind: Literal["cell", "field"]
    image_size: tuple[int, int]  # width, height
    cells: tuple[CellResult, ...]
    features: NDArray[np.float32] = field(repr=False)  # of the counted ones
    rbc_diameter_px: float | None = None  # of a red cell, in pixels
    class_probabilities: tuple[dict[str, float], ...] = ()  # of a single cell, by class
    duplicate_of: str | None = None  # the picture that shows the same: its cells count once
    measured_diameter_px: float | None = None  # the diameter as this field tells it, whatever was given

    def to_dict(self) -> dict[str, Any]:
        if self.kind == "cell":
            (cell,) = self.cells
            cell_record = cell.to_dict()
            return {
                "path": self.name,
                "kind": "cell",
                "repeats": self.duplicate_of,
                **{k: cell_record[k] for k in ("class", "probability", "probability_of", "flagged", "counted", "why")},
                "probabilities": self.class_probabilities[0],
            }
        counts = Counter(cell.label for cell in self.cells if cell.is_counted)
        return {
            "path": self.name,
            "kind": "field",
            "repeats": self.duplicate_of,
            "size": list(self.image_size),
            "diameter": self.rbc_diameter_px,
            "counts": {str(label): n for label, n in sorted(counts.items(), key=str)},
            "excluded": count_excluded([self]),
            "cells": [cell.to_dict() for cell in self.cells],
        }


@dataclass(frozen=True)
class SlideCounts:
    """What all pictures of one slide have shown."""

    num_counted: int
    num_flagged: int
    num_found: int  # cells and other things
    excluded: Mapping[str, int]
    drift: float | None
    rbc_diameters_px: tuple[float, ...] = ()  # of a red cell, in each field
    measured_diameters_px: tuple[float, ...] = ()  # where a size was given: what the fields themselves tell
    num_single_cells: int = 0  # pictures of one cell among those counted
    unfit_reason: str | None = None  # what this lab found out about the model


@dataclass(frozen=True)
class SlideResult:
    """All pictures of one slide together."""

    estimate: PrevalenceEstimate
    operating_point: OperatingPoint | None
    num_found: int  # cells and other things
    excluded: dict[str, int]
    drift: float | None
    positive_class: str | None
    reliability_warnings: tuple[str, ...] = ()  # with any, nothing is decided
    notes: tuple[str, ...] = ()  # what a reader has to know besides

    def to_dict(self) -> dict[str, Any]:
        has_drifted = self.drift is not None and self.drift > MAX_DRIFT
        return {
            **self.estimate.to_dict(),
            "line": SUSPICION_THRESHOLD,
            "found": self.num_found,
            "excluded": self.excluded,
            "positive": self.positive_class,
            "operating_point": self.operating_point.to_dict() if self.operating_point else None,
            "drift": self.drift,
            "drifted": has_drifted,
            "doubts": list(self.reliability_warnings),
            "notes": list(self.notes),
            "notice": RESEARCH_USE_NOTICE,
        }


@dataclass(frozen=True)
class SlideReader:
    runtime: BundleRuntime
    operating_point: OperatingPoint | None
    input_type: InputType = "auto"
    rbc_diameter_px: float | None = None  # pixels of a red cell in these fields, if known

    def is_field(self, input_image: InputImage) -> bool:
        return self.input_type == "field" or (
            self.input_type == "auto" and is_field_image(self.runtime.bundle, input_image)
        )

    def read_image(self, input_image: InputImage) -> ImageResult:
        return self.read_field(input_image) if self.is_field(input_image) else self.read_cells([input_image])[0]

    def read_cells(self, input_images: Sequence[InputImage]) -> list[ImageResult]:
        """Single cells, all at once: some models see colours by those of all of them."""
        manifest = self.runtime.bundle.manifest
        resized_images = [
            resize_images(input_image.pixels[None], manifest.input_size, manifest.resize)
            for input_image in input_images
        ]
        predictions = self.runtime.predict(
            np.concatenate([*resized_images, np.zeros((0, *manifest.input_size, 3), np.uint8)])
        )
        boxes: list[BoundingBox] = [(0, 0, p.pixels.shape[1], p.pixels.shape[0]) for p in input_images]
        results = []
        for n, (input_image, cell) in enumerate(
            zip(input_images, self._iter_cell_results(boxes, predictions), strict=True)
        ):
            class_probabilities = dict(zip(self.runtime.classes, map(float, predictions.probabilities[n]), strict=True))
            features = predictions.features[n : n + 1] if cell.is_counted else predictions.features[:0]
            results.append(
                ImageResult(
                    name=input_image.name,
                    kind="cell",
                    image_size=cell.box[2:],
                    cells=(cell,),
                    features=features,
                    rbc_diameter_px=None,
                    class_probabilities=(class_probabilities,),
                )
            )
        return results

    def read_field(self, input_image: InputImage) -> ImageResult:
        from deploy.segmentation.find_cells import find_cells

        manifest = self.runtime.bundle.manifest
        if manifest.crop_diameters is None or manifest.rbc_diameter_px is None:
            raise IncompatibleStudyError(
                f"{manifest.name} was trained on single images, and how large a cell is in a field is not known; cut cells out "
                "first, or export with --crop-px and --rbc-diameter-px"
            )
        image = input_image.pixels
        segmentation = find_cells(image, self.rbc_diameter_px)
        rbc_diameter_px = segmentation.rbc_diameter_px or manifest.rbc_diameter_px
        low, high = SCALE_TOLERANCE
        if self.rbc_diameter_px is None and low < rbc_diameter_px / manifest.rbc_diameter_px < high:
            rbc_diameter_px = manifest.rbc_diameter_px
        red_cells = [region for region in segmentation.regions if region.kind == "red"]
        predictions = self.runtime.predict(
            crop_cells(image, [b.center for b in red_cells], round(manifest.crop_diameters * rbc_diameter_px))
        )
        cell_results = iter(self._iter_cell_results([b.box for b in red_cells], predictions))
        cells = tuple(
            next(cell_results) if region.kind == "red" else _exclude_region(region) for region in segmentation.regions
        )
        is_counted = np.array([reason is None for reason in predictions.rejection_reasons], bool)
        height, width = image.shape[:2]
        features = predictions.features[is_counted]
        return ImageResult(
            input_image.name,
            "field",
            (width, height),
            cells,
            features,
            float(rbc_diameter_px),
            measured_diameter_px=segmentation.measured_diameter_px or None,
        )

    def _iter_cell_results(self, boxes: Sequence[BoundingBox], predictions: Predictions) -> Iterator[CellResult]:
        runtime = self.runtime
        flags = runtime.flag_positives(predictions.probabilities, self.operating_point)
        for box, p, is_flagged, reason in zip(
            boxes, predictions.probabilities, flags, predictions.rejection_reasons, strict=True
        ):
            class_index = _select_class(p, runtime.positive_index, bool(is_flagged), self.operating_point is not None)
            probability_index = class_index if runtime.positive_index is None else runtime.positive_index
            is_positive = is_flagged and reason is None
            class_names = runtime.classes
            yield CellResult(
                box=box,
                kind="red",
                label=class_names[class_index],
                probability=float(p[probability_index]),
                is_flagged=bool(is_positive),
                is_counted=reason is None,
                exclusion_reason=reason,
                probability_class=class_names[probability_index],
            )


def _select_class(
    p: NDArray[np.float32], positive_index: int | None, is_flagged: bool, has_operating_point: bool
) -> int:
    """The class that is named: by the operating point where there is one, else the likeliest."""
    if positive_index is None or not has_operating_point:
        return int(p.argmax())
    others = np.delete(np.arange(len(p)), positive_index)
    return positive_index if is_flagged else int(others[p[others].argmax()])


def _exclude_region(region: CellRegion) -> CellResult:
    return CellResult(
        box=region.box,
        kind=region.kind,
        label=None,
        probability=None,
        is_flagged=False,
        is_counted=False,
        exclusion_reason=EXCLUSION_REASONS[region.kind],
    )


def crop_cells(image: NDArray[np.uint8], centers: Sequence[tuple[float, float]], crop_px: int) -> ImageBatch:
    """(n, side, side, 3) about the centres, mirrored at the border, as training cells were."""
    half = crop_px // 2
    if not centers:
        return np.zeros((0, crop_px, crop_px, 3), np.uint8)
    if min(image.shape[:2]) < 2:
        raise DataError("a field of one pixel's width holds no cells")
    padded = np.pad(image, ((half, crop_px), (half, crop_px), (0, 0)), mode="reflect")
    return np.stack([padded[round(y) : round(y) + crop_px, round(x) : round(x) + crop_px] for x, y in centers])


def count_excluded(image_results: Sequence[ImageResult]) -> dict[str, int]:
    """How many were not counted, by reason; an image's own details are left to the list of cells."""
    reasons = Counter(
        (c.exclusion_reason or "").partition(":")[0] for r in image_results for c in r.cells if not c.is_counted
    )
    return dict(sorted(reasons.items(), key=lambda item: -item[1]))


def summarize_slide(
    image_results: Sequence[ImageResult],
    runtime: BundleRuntime,
    operating_point: OperatingPoint | None,
    notes: Sequence[str] = (),
) -> SlideResult:
    unique_results = [image_result for image_result in image_results if image_result.duplicate_of is None]
    cells = [cell for image_result in unique_results for cell in image_result.cells]
    counted_cells = [cell for cell in cells if cell.is_counted]
    features = [r.features for r in unique_results if len(r.features)]
    measured_fields = [r for r in unique_results if r.rbc_diameter_px is not None and r.cells]
    slide_counts = SlideCounts(
        num_counted=len(counted_cells),
        num_flagged=sum(cell.is_flagged for cell in counted_cells),
        num_found=len(cells),
        excluded=count_excluded(unique_results),
        drift=runtime.ood_reference.compute_drift(np.concatenate(features))
        if runtime.ood_reference and features
        else None,
        rbc_diameters_px=tuple(r.rbc_diameter_px for r in measured_fields if r.rbc_diameter_px is not None),
        measured_diameters_px=tuple(
            r.measured_diameter_px for r in measured_fields if r.measured_diameter_px is not None
        ),
        num_single_cells=sum(r.kind == "cell" for r in unique_results),
        unfit_reason=runtime.unfit_reason,
    )
    return build_slide_result(slide_counts, operating_point, runtime.calibration.positive_class, notes)


def build_slide_result(
    slide_counts: SlideCounts,
    operating_point: OperatingPoint | None,
    positive_class: str | None,
    notes: Sequence[str] = (),
) -> SlideResult:
    reliability_warnings = tuple(find_reliability_warnings(slide_counts))
    estimate = assess_prevalence(
        slide_counts.num_counted, slide_counts.num_flagged, operating_point, reliability_warnings
    )
    return SlideResult(
        estimate=estimate,
        operating_point=operating_point,
        num_found=slide_counts.num_found,
        excluded=dict(slide_counts.excluded),
        drift=slide_counts.drift,
        positive_class=positive_class,
        reliability_warnings=reliability_warnings,
        notes=tuple(notes),
    )


def find_reliability_warnings(slide_counts: SlideCounts) -> Iterator[str]:
    """Why the model's rates may not hold on this slide."""
    if slide_counts.unfit_reason:
        yield f"{slide_counts.unfit_reason}: do not use this model here, or measure it anew (`hemofed edge calibrate`)"
    num_out_of_distribution, num_clumps = (
        slide_counts.excluded.get(reason, 0) for reason in (OUT_OF_DISTRIBUTION, EXCLUSION_REASONS["clump"])
    )
    if num_out_of_distribution > MAX_UNCOUNTED_FRACTION * (num_out_of_distribution + slide_counts.num_counted):
        yield (
            f"{num_out_of_distribution:,} of {num_out_of_distribution + slide_counts.num_counted:,} red cells look unlike those the model was validated on and are not counted: check "
            "stain, focus, light and magnification"
        )
    if num_clumps > MAX_UNCOUNTED_FRACTION * (num_clumps + slide_counts.num_counted):
        yield (
            f"{num_clumps:,} heaps of cells could not be separated, beside {slide_counts.num_counted:,} single ones: the fields are too crowded; "
            "take them where cells lie apart"
        )
    if slide_counts.drift is not None and slide_counts.drift > MAX_DRIFT:
        yield (
            "taken together, the counted cells look unlike those the model was validated on: check stain, focus, light and "
            "magnification, or measure the model here (`hemofed edge calibrate`)"
        )
    if slide_counts.rbc_diameters_px and max(slide_counts.rbc_diameters_px) > 1.5 * min(slide_counts.rbc_diameters_px):
        yield "the fields differ in magnification: give those of one microscope setting, or say --rbc-diameter-px"
    if (
        slide_counts.measured_diameters_px
        and not SCALE_TOLERANCE[0]
        < median(slide_counts.measured_diameters_px) / median(slide_counts.rbc_diameters_px)
        < SCALE_TOLERANCE[1]
    ):
        yield (
            f"the cells measure about {median(slide_counts.measured_diameters_px):.0f} pixels, not {median(slide_counts.rbc_diameters_px):.0f} as given: leave --rbc-diameter-px "
            "out, or give the right one"
        )
    if 0 < slide_counts.num_single_cells < RECOMMENDED_CELLS:
        yield f"pictures of {slide_counts.num_single_cells:,} single cells may have been picked: give whole fields, or all cells of a slide"
    if not slide_counts.num_found:
        yield "no cell was found: is it a smear, in focus and evenly lit?"
