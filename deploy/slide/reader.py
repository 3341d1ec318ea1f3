"""Images -> the model's result: single cells directly, whole fields after segmentation into cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from deploy.bundle.crop import is_field_image
from deploy.bundle.operating_points import OperatingPoint
from deploy.inference.resize import ImageBatch, resize_images
from deploy.inference.runtime import BundleRuntime, Predictions
from deploy.slide.image_result import EXCLUSION_REASONS, BoundingBox, CellResult, ImageResult
from pipeline.core.errors import DataError, IncompatibleStudyError

if TYPE_CHECKING:
    from deploy.imaging.input_image import InputImage
    from deploy.segmentation.find_cells import CellRegion

InputType = Literal["auto", "cell", "field"]
# a field whose red cells measure between these multiples of the training diameter has the training scale
SCALE_TOLERANCE = (0.8, 1.25)


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
                    pixel_digest=input_image.pixel_digest,
                    identity=input_image.identity,
                    class_probabilities=class_probabilities,
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
        return ImageResult(
            name=input_image.name,
            kind="field",
            image_size=(image.shape[1], image.shape[0]),
            cells=cells,
            features=predictions.features[is_counted],
            pixel_digest=input_image.pixel_digest,
            identity=input_image.identity,
            rbc_diameter_px=float(rbc_diameter_px),
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
