"""The result of a slide as JSON: what `hemofed predict --json` prints and the page saves (docs/schemas/slide.json)."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from deploy.bundle.notice import RESEARCH_USE_NOTICE
from deploy.inference.runtime import ModelInfo

FORMAT_VERSION: Final = 1


class CellRecord(BaseModel):
    """One cell, or another region of a field."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, allow_inf_nan=False)

    box: tuple[int, int, int, int] = Field(description="x0, y0, x1, y1 in pixels of the image")
    label: str | None = Field(alias="class", description="null for regions that the model does not classify")
    kind: str = Field(description="red, or another kind of region")
    probability: float | None = Field(description="of probability_class")
    is_flagged: bool
    is_counted: bool
    exclusion_reason: str | None = Field(description="null if the cell is counted")
    probability_class: str | None = Field(description="the positive class, or else the class")


class CellImageRecord(BaseModel):
    """An image of a single cell."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, allow_inf_nan=False)

    path: str
    kind: Literal["cell"] = "cell"
    duplicate_of: str | None = Field(description="an earlier image with the same pixels: its cells count once")
    label: str | None = Field(alias="class")
    probability: float | None = Field(description="of probability_class")
    probability_class: str | None
    is_flagged: bool
    is_counted: bool
    exclusion_reason: str | None
    class_probabilities: dict[str, float]


class FieldRecord(BaseModel):
    """An image of a whole field."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    path: str
    kind: Literal["field"] = "field"
    duplicate_of: str | None = Field(description="an earlier image with the same pixels: its cells count once")
    image_size: tuple[int, int] = Field(description="width, height")
    rbc_diameter_px: float | None = Field(description="of a red cell")
    counts: dict[str, int] = Field(description="counted cells by class")
    excluded: dict[str, int] = Field(description="regions that are not counted, by reason")
    cells: tuple[CellRecord, ...]


class FailureRecord(BaseModel):
    """An image that could not be read."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    path: str
    error: str


class OperatingPointRecord(BaseModel):
    """A threshold, and the confusion counts of labelled images at it."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    name: str
    log_odds: float
    tp: int
    fn: int
    tn: int
    fp: int
    sensitivity_spread: float
    specificity_spread: float
    probability: float
    sensitivity: float | None
    specificity: float | None


class SlideRecord(BaseModel):
    """The result of all images of one slide. Shares are fractions from 0 to 1."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    num_counted: int = Field(description="red cells that the out-of-distribution guard accepted")
    num_flagged: int = Field(description="of these, called positive")
    flagged_fraction: float | None
    prevalence: float | None = Field(description="corrected for the model's errors")
    prevalence_low: float | None = Field(description="lower limit of its 95 % interval")
    prevalence_high: float | None
    verdict: str
    needs_review: bool = Field(description="the prevalence reaches the threshold, whatever the interval says")
    reason: str
    has_enough_cells: bool
    suspicion_threshold: float
    num_found: int = Field(description="regions: cells and everything else")
    excluded: dict[str, int] = Field(description="regions that are not counted, by reason")
    positive_class: str | None
    operating_point: OperatingPointRecord | None
    drift: float | None
    has_drifted: bool
    reliability_warnings: tuple[str, ...] = Field(description="any of them excludes a verdict")
    notes: tuple[str, ...] = Field(description="without effect on the verdict")
    notice: str = RESEARCH_USE_NOTICE


class SlideDocument(BaseModel):
    """The result of one slide, with all of its images."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    format: Literal[1] = FORMAT_VERSION
    notice: str = RESEARCH_USE_NOTICE
    bundle: ModelInfo
    images: tuple[CellImageRecord | FieldRecord | FailureRecord, ...]
    slide: SlideRecord
    written: tuple[str, ...] = Field(default=(), description="files that were written")
