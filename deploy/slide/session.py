"""The images of one slide become its result: each image counts once, and all belong to one patient.

`hemofed predict` and the local page both count with `SlideSession`, so that they give one result for one slide.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from deploy.bundle.ood_guard import MIN_SAMPLES
from deploy.bundle.operating_points import OperatingPoint
from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import ImageFailure, ImageSummary, sort_by_count
from deploy.slide.reliability import find_reliability_warnings
from deploy.slide.slide_result import SlideCounts, SlideResult
from deploy.slide.verdict import assess_prevalence
from pipeline.core.errors import DataError

MAX_DUPLICATE_NOTES = 3  # duplicate images named in the notes
SEVERAL_PATIENTS = "the DICOM files belong to several patients; give those of one slide at a time"
SEVERAL_STUDIES = "the DICOM files belong to several studies or accessions: give those of one slide at a time"


class SlideSession:
    def __init__(self, runtime: BundleRuntime, operating_point: OperatingPoint | None) -> None:
        self.runtime, self.operating_point = runtime, operating_point
        self.failures: list[ImageFailure] = []
        self._images: list[ImageSummary] = []  # duplicates too, which are not counted
        self._first_by_digest: dict[str, ImageSummary] = {}

    def add_image(self, image: ImageSummary) -> str | None:
        """The name of an earlier image with the same pixels, whose cells count in this one's place; None if it is new.

        Raises if the image is of another patient than an earlier one.
        """
        self._check_patient(image)
        first = self._first_by_digest.setdefault(image.pixel_digest, image)
        self._images.append(image)
        return None if first is image else first.name

    def add_failure(self, failure: ImageFailure) -> None:
        """An image that could not be read: the result says so."""
        self.failures.append(failure)

    def result(self) -> SlideResult:
        runtime, counts = self.runtime, self._count_cells()
        warnings = tuple(find_reliability_warnings(counts, runtime.unfit_reason))
        return SlideResult(
            counts=counts,
            estimate=assess_prevalence(counts.num_counted, counts.num_flagged, self.operating_point, warnings),
            operating_point=self.operating_point,
            positive_class=runtime.calibration.positive_class,
            reliability_warnings=warnings,
            notes=tuple(self._build_notes()),
        )

    def _check_patient(self, image: ImageSummary) -> None:
        other = next((other for other in self._images if other.patient is not None), None)
        if other is not None and image.patient not in (None, other.patient):
            raise DataError(f"{SEVERAL_PATIENTS} ({image.name} is not of the patient of {other.name})")

    def _count_cells(self) -> SlideCounts:
        images = list(self._first_by_digest.values())
        fields = [image for image in images if image.rbc_diameter_px is not None and image.num_found]
        return SlideCounts(
            num_counted=sum(image.num_counted for image in images),
            num_flagged=sum(image.num_flagged for image in images),
            num_found=sum(image.num_found for image in images),
            excluded=sort_by_count(sum((Counter(image.excluded) for image in images), Counter())),
            drift=self._compute_drift(images),
            rbc_diameters_px=tuple(f.rbc_diameter_px for f in fields if f.rbc_diameter_px is not None),
            measured_diameters_px=tuple(f.measured_diameter_px for f in fields if f.measured_diameter_px is not None),
            num_single_cells=sum(image.kind == "cell" for image in images),
        )

    def _compute_drift(self, images: list[ImageSummary]) -> float | None:
        """The drift of the mean over all counted cells; None for fewer than MIN_SAMPLES."""
        reference = self.runtime.ood_reference
        sums = [image.feature_sums for image in images if image.feature_sums is not None]
        num_cells = sum(image.num_counted for image in images if image.feature_sums is not None)
        if reference is None or num_cells < MIN_SAMPLES:
            return None
        num_features = len(reference.feature_mean)
        if any(len(one) != num_features for one in sums):
            raise DataError(f"feature_sums must have {num_features} numbers each; send those that /api/images gives")
        return reference.drift_of_mean(np.sum(sums, 0) / num_cells)

    def _build_notes(self) -> list[str]:
        """What the reader should know and does not affect the verdict."""
        studies = {image.study for image in self._images if image.study is not None}
        return [
            *([SEVERAL_STUDIES] if len(studies) > 1 else []),
            *self._duplicate_notes(),
            *self._failure_notes(),
        ]

    def _duplicate_notes(self) -> list[str]:
        pairs = [(image, self._first_by_digest[image.pixel_digest]) for image in self._images]
        notes = [
            f"{image.name} shows the same image as {first.name} and is not counted again"
            for image, first in pairs
            if first is not image
        ]
        if len(notes) <= MAX_DUPLICATE_NOTES:
            return notes
        num_named = MAX_DUPLICATE_NOTES - 1
        return [*notes[:num_named], f"{len(notes) - num_named} more images are duplicates"]

    def _failure_notes(self) -> list[str]:
        num_failed = len(self.failures)
        if not num_failed:
            return []
        pronoun = "it" if num_failed == 1 else "them"
        return [
            f"{num_failed} of {num_failed + len(self._images)} images could not be read: the result does not include {pronoun}"
        ]
