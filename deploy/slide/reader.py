"""Images -> the model's result: single cells directly, whole fields after segmentation into cells."""

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
from deploy.slide.verdict import (
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
# a field whose red cells measure between these multiples of the training diameter has the training scale
SCALE_TOLERANCE = (0.8, 1.25)
MAX_UNCOUNTED_FRACTION = 0.2  # of red cells rejected or in clumps; a few are on every slide
CELL_KEYS = ("class", "probability", "probability_class", "is_flagged", "is_counted", "exclusion_reason")
EXCLUSION_REASONS = {
    "white": "white cell",
    "platelet": "platelet",
    "clump": "cells that could not be separated",
    "border": "cut by the edge of the image",
    "debris": "not a cell",
}


@dataclass(frozen=True)
class CellResult:
    box: BoundingBox  # x0, y0, x1, y1 in pixels of the image
    kind: str  # red, or another kind of region
    label: str | None  # the class; None for regions that the model does not classify
    probability: float | None  # of `probability_class`
    is_flagged: bool
    is_counted: bool
    exclusion_reason: str | None  # None if the cell is counted
    probability_class: str | None = None  # the positive class, or else `label`

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"box": list(fields.pop("box")), "class": fields.pop("label"), **fields}


@dataclass(frozen=True)
class ImageResult:
    """One image. A single cell has a box as large as its image."""

    name: str
    kind: Literal["cell", "field"]
    image_size: tuple[int, int]  # width, height
    cells: tuple[CellResult, ...]
    features: NDArray[np.float32] = field(repr=False)  # of the counted ones
    rbc_diameter_px: float | None = None  # of a red cell, in pixels
    class_probabilities: tuple[dict[str, float], ...] = ()  # of a single cell, by class
    duplicate_of: str | None = None  # an earlier image with the same pixels: its cells count once
    measured_diameter_px: float | None = None  # measured in this field where a diameter was given

    def to_dict(self) -> dict[str, Any]:
        if self.kind == "cell":
            (cell,) = self.cells
            cell_record = cell.to_dict()
            return {
                "path": self.name,
                "kind": "cell",
                "duplicate_of": self.duplicate_of,
                **{key: cell_record[key] for key in CELL_KEYS},
                "class_probabilities": self.class_probabilities[0],
            }
        counts = Counter(cell.label for cell in self.cells if cell.is_counted)
        return {
            "path": self.name,
            "kind": "field",
            "duplicate_of": self.duplicate_of,
            "image_size": list(self.image_size),
            "rbc_diameter_px": self.rbc_diameter_px,
            "counts": {str(label): n for label, n in sorted(counts.items(), key=str)},
            "excluded": count_excluded([self]),
            "cells": [cell.to_dict() for cell in self.cells],
        }


@dataclass(frozen=True)
class SlideCounts:
    """Counts over all images of one slide."""

    num_counted: int
    num_flagged: int
    num_found: int  # regions: cells and everything else
    excluded: Mapping[str, int]  # reason -> regions
    drift: float | None
    rbc_diameters_px: tuple[float, ...] = ()  # of a red cell, in each field
    measured_diameters_px: tuple[float, ...] = ()  # measured in the fields where a diameter was given
    num_single_cells: int = 0  # images of one cell
    unfit_reason: str | None = None  # of the local calibration


@dataclass(frozen=True)
class SlideResult:
    """The result of all images of one slide."""

    estimate: PrevalenceEstimate
    operating_point: OperatingPoint | None
    num_found: int  # regions: cells and everything else
    excluded: dict[str, int]
    drift: float | None
    positive_class: str | None
    reliability_warnings: tuple[str, ...] = ()  # any of them excludes a verdict
    notes: tuple[str, ...] = ()  # for the reader; without effect on the verdict

    def to_dict(self) -> dict[str, Any]:
        has_drifted = self.drift is not None and self.drift > MAX_DRIFT
        return {
            **self.estimate.to_dict(),
            "suspicion_threshold": SUSPICION_THRESHOLD,
            "num_found": self.num_found,
            "excluded": self.excluded,
            "positive_class": self.positive_class,
            "operating_point": self.operating_point.to_dict() if self.operating_point else None,
            "drift": self.drift,
            "has_drifted": has_drifted,
            "reliability_warnings": list(self.reliability_warnings),
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
        """Single cells in one batch: some color normalizations use the colors of all images."""
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
                f"{manifest.name} was trained on single images, so the size of a cell in a field is unknown; cut cells out "
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
            crop_cells(image, [r.center for r in red_cells], round(manifest.crop_diameters * rbc_diameter_px))
        )
        cell_results = iter(self._iter_cell_results([r.box for r in red_cells], predictions))
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
    """The class that the operating point decides on; without one, the most probable class."""
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
    """(n, crop_px, crop_px, 3) around the centers, mirrored at the border like training cells."""
    half = crop_px // 2
    if not centers:
        return np.zeros((0, crop_px, crop_px, 3), np.uint8)
    if min(image.shape[:2]) < 2:
        raise DataError("a field one pixel wide holds no cells; give a larger image")
    padded = np.pad(image, ((half, crop_px), (half, crop_px), (0, 0)), mode="reflect")
    return np.stack([padded[round(y) : round(y) + crop_px, round(x) : round(x) + crop_px] for x, y in centers])


def count_excluded(image_results: Sequence[ImageResult]) -> dict[str, int]:
    """Number of excluded regions by reason, without the details after the reason's colon."""
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
    """Why the model's error rates may not hold on this slide."""
    if slide_counts.unfit_reason:
        yield f"{slide_counts.unfit_reason}: do not use this model here, or measure it again (`hemofed edge calibrate`)"
    num_out_of_distribution, num_clumps = (
        slide_counts.excluded.get(reason, 0) for reason in (OUT_OF_DISTRIBUTION, EXCLUSION_REASONS["clump"])
    )
    num_red_cells = num_out_of_distribution + slide_counts.num_counted
    if num_out_of_distribution > MAX_UNCOUNTED_FRACTION * num_red_cells:
        yield (
            f"{num_out_of_distribution:,} of {num_red_cells:,} red cells look unlike the validation images and are not counted: check "
            "stain, focus, light and magnification"
        )
    if num_clumps > MAX_UNCOUNTED_FRACTION * (num_clumps + slide_counts.num_counted):
        yield (
            f"{num_clumps:,} clumps of cells could not be separated, against {slide_counts.num_counted:,} single cells: the fields "
            "are too crowded; take them where cells do not overlap"
        )
    if slide_counts.drift is not None and slide_counts.drift > MAX_DRIFT:
        yield (
            "on average, the counted cells look unlike the validation images: check stain, focus, light and "
            "magnification, or measure the model here (`hemofed edge calibrate`)"
        )
    if slide_counts.rbc_diameters_px and max(slide_counts.rbc_diameters_px) > 1.5 * min(slide_counts.rbc_diameters_px):
        yield "the fields differ in magnification: give those of one microscope setting, or set --rbc-diameter-px"
    if (
        slide_counts.measured_diameters_px
        and not SCALE_TOLERANCE[0]
        < median(slide_counts.measured_diameters_px) / median(slide_counts.rbc_diameters_px)
        < SCALE_TOLERANCE[1]
    ):
        yield (
            f"the cells measure about {median(slide_counts.measured_diameters_px):.0f} pixels, not {median(slide_counts.rbc_diameters_px):.0f} as given: leave --rbc-diameter-px "
            "out, or correct it"
        )
    if 0 < slide_counts.num_single_cells < RECOMMENDED_CELLS:
        yield f"{slide_counts.num_single_cells:,} images of single cells may be a selection: give whole fields, or all cells of a slide"
    if not slide_counts.num_found:
        yield "no cell was found: check that the image is a smear, in focus and evenly lit"
