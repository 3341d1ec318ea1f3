"""What the model says about one image, and the summary of it from which a slide's result is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.imaging.input_image import SlideIdentity
from deploy.slide.json_format import CellImageRecord, CellRecord, FieldRecord

BoundingBox = tuple[int, int, int, int]
BoundedCount = Annotated[int, Field(ge=0, le=10**9)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
DiameterPx = Annotated[float, Field(gt=0, le=1e4)]
MAX_NAME_CHARS = 5000  # a path has at most 4,096 bytes
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

    def to_record(self) -> CellRecord:
        return CellRecord.model_validate(self, from_attributes=True)


@dataclass(frozen=True)
class ImageResult:
    """One image. A single cell has a box as large as its image."""

    name: str
    kind: Literal["cell", "field"]
    image_size: tuple[int, int]  # width, height
    cells: tuple[CellResult, ...]
    features: NDArray[np.float32] = field(repr=False)  # of the counted ones
    pixel_digest: str
    identity: SlideIdentity | None  # of a DICOM image
    rbc_diameter_px: float | None = None  # of a red cell, in pixels
    class_probabilities: dict[str, float] = field(default_factory=dict)  # of a single cell
    duplicate_of: str | None = None  # an earlier image with the same pixels: its cells count once
    measured_diameter_px: float | None = None  # measured in this field where a diameter was given

    @property
    def num_counted(self) -> int:
        return sum(cell.is_counted for cell in self.cells)

    @property
    def num_flagged(self) -> int:
        return sum(cell.is_flagged for cell in self.cells)

    def to_record(self) -> CellImageRecord | FieldRecord:
        if self.kind == "cell":
            (cell,) = self.cells
            return CellImageRecord(
                path=self.name,
                duplicate_of=self.duplicate_of,
                label=cell.label,
                probability=cell.probability,
                probability_class=cell.probability_class,
                is_flagged=cell.is_flagged,
                is_counted=cell.is_counted,
                exclusion_reason=cell.exclusion_reason,
                class_probabilities=self.class_probabilities,
            )
        counts = Counter(str(cell.label) for cell in self.cells if cell.is_counted)
        return FieldRecord(
            path=self.name,
            duplicate_of=self.duplicate_of,
            image_size=self.image_size,
            rbc_diameter_px=self.rbc_diameter_px,
            counts=dict(sorted(counts.items())),
            excluded=sort_by_count(count_excluded(self.cells)),
            cells=tuple(cell.to_record() for cell in self.cells),
        )

    def to_dict(self) -> dict[str, Any]:
        return self.to_record().model_dump(mode="json", by_alias=True)

    def summarize(self) -> ImageSummary:
        return ImageSummary(
            name=self.name,
            kind=self.kind,
            pixel_digest=self.pixel_digest,
            patient=self.identity.patient if self.identity else None,
            study=self.identity.study if self.identity else None,
            num_found=len(self.cells),
            num_counted=self.num_counted,
            num_flagged=self.num_flagged,
            excluded=count_excluded(self.cells),
            feature_sums=tuple(self.features.sum(0, dtype=np.float64).tolist()) if self.features.size else None,
            rbc_diameter_px=self.rbc_diameter_px,
            measured_diameter_px=self.measured_diameter_px,
        )


class ImageSummary(BaseModel):
    """What a slide's result needs of one image. The page keeps it in the browser, so every number has its bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(max_length=MAX_NAME_CHARS)
    kind: Literal["cell", "field"]
    pixel_digest: Digest
    patient: Digest | None  # of `SlideIdentity`
    study: Digest | None
    num_found: BoundedCount  # regions: cells and everything else
    num_counted: BoundedCount  # red cells that the out-of-distribution guard accepted
    num_flagged: BoundedCount  # of these, called positive at the operating point
    excluded: dict[Annotated[str, Field(max_length=200)], BoundedCount] = Field(max_length=100)  # reason -> regions
    feature_sums: tuple[Annotated[float, Field(ge=-1e15, le=1e15)], ...] | None  # over the counted cells, whitened
    rbc_diameter_px: DiameterPx | None
    measured_diameter_px: DiameterPx | None = None

    @model_validator(mode="after")
    def _validate_counts(self) -> Self:
        if self.num_flagged > self.num_counted:
            raise ValueError(
                f"{self.num_flagged} flagged of {self.num_counted} counted; flagged cells must be among the counted"
            )
        if self.num_counted + sum(self.excluded.values()) != self.num_found:
            raise ValueError(
                f"{self.num_counted} counted and {sum(self.excluded.values())} excluded, but {self.num_found} found; send what /api/images gives"
            )
        return self


class ImageFailure(BaseModel):
    """An image that could not be read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=MAX_NAME_CHARS)
    reason: str = Field(max_length=100_000)


def count_excluded(cells: Sequence[CellResult]) -> Counter[str]:
    """Number of excluded regions by reason, without the details after the reason's colon."""
    return Counter((cell.exclusion_reason or "").partition(":")[0] for cell in cells if not cell.is_counted)


def sort_by_count(counts: Counter[str]) -> dict[str, int]:
    """The most frequent first."""
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
