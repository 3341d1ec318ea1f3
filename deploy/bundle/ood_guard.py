"""When not to answer: images that are unlike those the model was validated on, or too poor to be judged."""

from __future__ import annotations

import math
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from models.probe.feature_names import MEASURES, NEUTRAL

OUTSIDE = "outside what the model has seen"
FAR_RATE = 0.005  # of a class's validation images may be called foreign by the distance ...
POOR_RATE = 0.001  # ... and of all by each end of each measure
ROOM = 4 / 3  # measures may go so many times beyond: images come by the slide, and validation saw few slides
ENOUGH = 20  # images of a class by which a distance can be set, cells of a slide that tell its drift
NEAREST, FARTHEST = -3.0, 5.0  # as sites/training/validation_profile.py bins distances: binary logarithms
DRIFTED = 1.0  # the slide's mean lies farther out than sites' images do


class Reference(BaseModel):
    """What validation images looked like, from sums over sites, and how often the guard errs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    images: int = Field(ge=0, le=10**9)
    centres: tuple[tuple[float, ...], ...] = Field(min_length=1)  # of the classes, in whitened traits
    middle: tuple[float, ...]  # of all images, likewise; slides drift from here
    distance: float = Field(gt=0)  # from the nearest centre, the farthest that is answered for
    limits: dict[str, tuple[float, float]]
    measured: dict[str, tuple[float, float]] = Field(default_factory=dict)  # mean and standard deviation
    false_alarms: float = Field(ge=0, le=1)  # at most this share of validation images is refused
    catches: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict
    )  # such images that are refused

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.limits.keys() != MEASURES.keys() or any(low >= high for low, high in self.limits.values()):
            raise ValueError("limits must be a lower and a higher number for each measure")
        if len({len(self.middle), *map(len, self.centres)}) != 1:
            raise ValueError("middle and centres must have as many numbers")
        return self

    def refusals(self, traits: NDArray[np.float32], measures: NDArray[np.float32]) -> list[str | None]:
        """(N, D) whitened traits, (N, Q) measures -> why each image is not answered for, or None."""
        reasons: list[list[str]] = [[] for _ in traits]
        for column, name in enumerate(MEASURES):
            low, high = self.limits[name]
            for row in np.flatnonzero(~(measures[:, column] >= low)):
                reasons[row].append(MEASURES[name][0])
            for row in np.flatnonzero(measures[:, column] > high):
                reasons[row].append(MEASURES[name][1])
        for row in np.flatnonzero(~(self.distances(traits) <= self.distance)):
            reasons[row].append("its features are foreign")
        return [f"{OUTSIDE}: {', '.join(why)}" if why else None for why in reasons]

    def distances(self, traits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Root mean square from the nearest centre: about 1 for images like those measured."""
        centres = np.array(self.centres, np.float64)
        apart = np.square(traits.astype(np.float64)[:, None] - centres).mean(2)  # (N, C)
        return np.asarray(np.sqrt(apart.min(1)))

    def drift(self, traits: NDArray[np.float32]) -> float | None:
        """How far a slide's mean lies from the middle: sites' own images lie within about 1. None of too few cells."""
        if len(traits) < ENOUGH:
            return None
        return self.drift_of(traits.mean(0, dtype=np.float64))

    def drift_of(self, mean: NDArray[np.float64]) -> float:
        return float(np.sqrt(np.mean(np.square(mean - np.array(self.middle)))))


def reference_of(
    images: int, centres: NDArray[np.float64], far: NDArray[np.int64], measured: NDArray[np.int64]
) -> Reference:
    """From (C, D) centres, (C, bins) counts by distance and (Q, bins) counts by measure."""
    bins, width = far.shape[1], centres.shape[1]
    # of the class that lies farthest out: a rare one must not be refused for being rare
    place = max(_upper(row, FAR_RATE) for row in (far if not any(_many(far)) else far[_many(far)]))
    inside = 2 ** (NEAREST + (place + 1) / bins * (FARTHEST - NEAREST))
    # the middle and spread were taken from these very images, so others lie farther out: leave-one-out, by leverage
    leverage = min(0.5, inside**2 * width / max(images, 1))
    limits, moments = {}, {}
    alarms = float(far[:, place + 1 :].sum())
    for name, row in zip(MEASURES, measured, strict=True):
        grid = (np.arange(len(row)) + 0.5) / len(row)
        low, high = len(row) - 1 - _upper(row[::-1], POOR_RATE), _upper(row, POOR_RATE) + 1
        limits[name] = (_beyond(low / len(row), name, -1), _beyond(high / len(row), name, 1))
        mean = float(grid @ row / max(row.sum(), 1))
        moments[name] = (mean, math.sqrt(max(0.0, float(grid**2 @ row / max(row.sum(), 1)) - mean**2)))
        alarms += float(row[(grid < limits[name][0]) | (grid > limits[name][1])].sum())
    return Reference(images=images, centres=centres.tolist(), middle=(0.0,) * width, distance=inside / (1 - leverage),
                     limits=limits, measured=moments, false_alarms=min(1.0, alarms / max(images, 1)))  # fmt: skip


def _many(far: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray(far.sum(1) >= ENOUGH)


def _beyond(end: float, name: str, side: int) -> float:
    """An end of a measure, ROOM times as far out."""
    neutral = NEUTRAL.get(name, 0.0)
    return neutral + (end - neutral) * (ROOM if side * (end - neutral) > 0 else 1 / ROOM)


def _upper(counts: NDArray[np.int64], rate: float) -> int:
    """The bin above which at most a share `rate` lies."""
    above = counts.sum() - np.cumsum(counts)
    return int(np.argmax(above <= rate * counts.sum()))
