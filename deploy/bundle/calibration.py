"""Calibration of a model: the temperature that makes its probabilities honest, and its operating points.

The temperature is fitted on the sites' validation images (pipeline/coordinator/validation_profile.py), or on a lab's own
labelled cells (deploy/inference/local_calibration.py).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from deploy.bundle.operating_points import MIN_PROBABILITY, OperatingPoint
from pipeline.core.errors import StudyError


class ModelCalibration(BaseModel):
    """The temperature and the operating points of a model; a local calibration has its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(gt=1e-3, lt=1e3)
    positive_class: str | None
    operating_points: tuple[OperatingPoint, ...]  # the named ones; the first is the default
    curve: tuple[OperatingPoint, ...] = ()  # from strict to lenient
    measured_on: str  # a text
    loss: float | None = None  # mean, at the temperature
    loss_before: float | None = None  # at temperature 1

    def find_point(self, name: str | None = None) -> OperatingPoint | None:
        if name is None:
            return self.operating_points[0] if self.operating_points else None
        return next((p for p in self.operating_points if p.name == name), None)

    @property
    def sorted_points(self) -> list[OperatingPoint]:
        """Named points and curve, from strict to lenient; the thinned curve may lack the named points."""
        points_by_log_odds = {p.log_odds: p for p in (*self.curve, *reversed(self.operating_points))}
        return sorted(points_by_log_odds.values(), key=lambda p: -p.log_odds)

    def point_at_probability(self, probability: float) -> OperatingPoint:
        """The measured point with the lowest threshold at or above a probability."""
        min_log_odds = math.log(max(probability, MIN_PROBABILITY) / max(1 - probability, MIN_PROBABILITY))
        above = [p for p in self.sorted_points if p.log_odds >= min_log_odds - 1e-9]
        if not above:
            highest = self.sorted_points[0].probability if self.sorted_points else 0.0
            raise StudyError(
                f"no operating point was measured at a probability of {probability:g} or above; the highest is {highest:.4f}"
            )
        return above[-1]


def rescale_temperature(probabilities: NDArray[np.float32], ratio: float) -> NDArray[np.float32]:
    """(N, C) at another temperature: softmax of the logits times `ratio`."""
    if ratio == 1:
        return probabilities
    logits = np.log(np.maximum(probabilities.astype(np.float64), 1e-30)) * ratio
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(1, keepdims=True), np.float32)
