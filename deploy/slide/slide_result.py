"""The counts over all images of one slide, and the slide's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.bundle.ood_guard import MAX_DRIFT
from deploy.bundle.operating_points import OperatingPoint
from deploy.slide.json_format import OperatingPointRecord, SlideRecord
from deploy.slide.verdict import RECOMMENDED_CELLS, SUSPICION_THRESHOLD, PrevalenceEstimate


@dataclass(frozen=True)
class SlideCounts:
    num_counted: int  # red cells that the out-of-distribution guard accepted
    num_flagged: int  # of these, called positive
    num_found: int  # regions: cells and everything else
    excluded: Mapping[str, int]  # reason -> regions
    drift: float | None
    rbc_diameters_px: tuple[float, ...] = ()  # of a red cell, in each field
    measured_diameters_px: tuple[float, ...] = ()  # measured in the fields where a diameter was given
    num_single_cells: int = 0  # images of one cell

    @property
    def flagged_fraction(self) -> float | None:
        return self.num_flagged / self.num_counted if self.num_counted else None

    @property
    def has_enough_cells(self) -> bool:
        return self.num_counted >= RECOMMENDED_CELLS

    @property
    def has_drifted(self) -> bool:
        return self.drift is not None and self.drift > MAX_DRIFT


@dataclass(frozen=True)
class SlideResult:
    """The result of all images of one slide."""

    counts: SlideCounts
    estimate: PrevalenceEstimate
    operating_point: OperatingPoint | None
    positive_class: str | None
    reliability_warnings: tuple[str, ...] = ()  # any of them excludes a verdict
    notes: tuple[str, ...] = ()  # for the reader; without effect on the verdict

    def to_record(self) -> SlideRecord:
        counts, estimate, point = self.counts, self.estimate, self.operating_point
        return SlideRecord(
            num_counted=counts.num_counted,
            num_flagged=counts.num_flagged,
            flagged_fraction=counts.flagged_fraction,
            prevalence=estimate.prevalence,
            prevalence_low=estimate.prevalence_low,
            prevalence_high=estimate.prevalence_high,
            verdict=estimate.verdict,
            needs_review=estimate.needs_review,
            reason=estimate.reason,
            has_enough_cells=counts.has_enough_cells,
            suspicion_threshold=SUSPICION_THRESHOLD,
            num_found=counts.num_found,
            excluded=dict(counts.excluded),
            positive_class=self.positive_class,
            operating_point=point and OperatingPointRecord.model_validate(point, from_attributes=True),
            drift=counts.drift,
            has_drifted=counts.has_drifted,
            reliability_warnings=self.reliability_warnings,
            notes=self.notes,
        )

    def to_dict(self) -> dict[str, Any]:
        return self.to_record().model_dump(mode="json")
