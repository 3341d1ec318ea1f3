"""Operating points: at which score a cell is called positive, and how often that was right on images with labels.

Scores are log-odds of one class against the rest at the model's temperature. Sites told how many of their validation
images fall into which of 4,096 bins of them, even in asinh(log-odds); thresholds are bins' lower edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from pipeline.core.errors import BadStudy

REACH = 10.0  # as sites/training/evaluation.py bins scores
SAFE, SCREEN = 0.998, 0.98  # specificities; at 0.98 nearly every healthy slide passes the line of 1 %
SHOWN = 48  # points of the curve that a bundle tells
TINY = 1e-12
Count = Annotated[int, Field(ge=0, le=10**9)]


class Point(BaseModel):
    """A threshold and what came of it: counts of labelled images."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    log_odds: float
    tp: Count
    fn: Count
    tn: Count
    fp: Count
    # standard deviations of sensitivity and specificity between sites, beyond chance; 0 where one place was measured
    sensitivity_spread: float = Field(default=0.0, ge=0, le=1)
    specificity_spread: float = Field(default=0.0, ge=0, le=1)

    @property
    def probability(self) -> float:
        return 1 / (1 + math.exp(-self.log_odds)) if self.log_odds > -700 else 0.0

    @property
    def sensitivity(self) -> float | None:
        return self.tp / (self.tp + self.fn) if self.tp + self.fn else None

    @property
    def specificity(self) -> float | None:
        return self.tn / (self.tn + self.fp) if self.tn + self.fp else None

    def told(self) -> dict[str, float | int | str | None]:
        return {**self.model_dump(), "probability": self.probability, "sensitivity": self.sensitivity,
                "specificity": self.specificity}  # fmt: skip


class Calibration(BaseModel):
    """How probabilities and decisions follow from a model's answers; a lab may have its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(gt=1e-3, lt=1e3)
    positive: str | None
    points: tuple[Point, ...]  # named ones, the first is the default
    curve: tuple[Point, ...] = ()  # from strict to lenient
    measured_on: str  # in words
    loss: float | None = None  # mean, at the temperature
    loss_before: float | None = None  # at temperature 1

    def point(self, name: str | None = None) -> Point | None:
        if name is None:
            return self.points[0] if self.points else None
        return next((p for p in self.points if p.name == name), None)

    @property
    def ladder(self) -> list[Point]:
        """All that a slider can stand at, from strict to lenient: the curve is thinned and need not hold the named ones."""
        steps = {p.log_odds: p for p in (*self.curve, *reversed(self.points))}
        return sorted(steps.values(), key=lambda p: -p.log_odds)

    def at(self, probability: float) -> Point:
        """The measured point with the threshold next above a probability."""
        wanted = math.log(max(probability, TINY) / max(1 - probability, TINY))
        above = [p for p in self.ladder if p.log_odds >= wanted - 1e-9]
        if not above:
            highest = self.ladder[0].probability if self.ladder else 0.0
            raise BadStudy(
                f"nothing was measured at a probability of {probability:g} or above; the highest is {highest:.4f}"
            )
        return above[-1]


def edge(bin: int, bins: int) -> float:
    """The lower edge of a bin, as log-odds."""
    return math.sinh(bin / bins * 2 * REACH - REACH)


def log_odds(probabilities: NDArray[np.float32], which: int) -> NDArray[np.float64]:
    """(N, C) -> (N,) of one class; 1 - p is summed over the others, so that it does not cancel near 1."""
    p = probabilities.astype(np.float64)
    others = np.delete(p, which, 1).sum(1)
    return np.asarray(np.log(np.maximum(p[:, which], TINY)) - np.log(np.maximum(others, TINY)))


def tempered(probabilities: NDArray[np.float32], ratio: float) -> NDArray[np.float32]:
    """(N, C) as they would be at another temperature: logits times `ratio`."""
    if ratio == 1:
        return probabilities
    logits = np.log(np.maximum(probabilities.astype(np.float64), 1e-30)) * ratio
    share = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(share / share.sum(1, keepdims=True), np.float32)


def binned(odds: NDArray[np.float64], own: NDArray[np.bool_], bins: int) -> NDArray[np.int64]:
    """(2, bins) counts of [others, class], as sites make them."""
    place = ((np.arcsinh(odds) + REACH) / (2 * REACH) * bins).astype(np.int64).clip(0, bins - 1)
    return np.stack([np.bincount(place[own == which], minlength=bins) for which in (False, True)])


def points_of(
    scores: NDArray[np.int64], between: NDArray[np.float64] | None = None
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Named points and the curve, from (2, bins) counts of [others, class]; none where one of both is missing.

    `between`: variances between sites of the shares that score at least so much, alike in shape.
    """
    others, own = scores
    if not own.sum() or not others.sum():
        return (), ()
    every = list(_thresholds(own, others, np.sqrt(np.zeros(scores.shape) if between is None else between)))
    safe, screen = _at_specificity(every, SAFE), _at_specificity(every, SCREEN)
    even = max(every, key=lambda p: (p.sensitivity or 0) + (p.specificity or 0))
    named = [(safe, "safe"), (screen, "screening"), (even, "even")]
    return tuple(point.model_copy(update={"name": name}) for point, name in named), _thinned(every)


def _thresholds(own: NDArray[np.int64], others: NDArray[np.int64], spread: NDArray[np.float64]) -> Iterator[Point]:
    """From strict to lenient, each at the score of one of the others.

    Were they between two of these, so that k of n others score higher, then of others to come (k + 1) / (n + 1) would on
    average; at the k-th score itself it is k / (n + 1), as counted.
    """
    hits, alarms = (np.cumsum(counts[::-1])[::-1] for counts in (own, others))  # at a bin's lower edge or above
    highest = int(np.flatnonzero(others)[-1]) + 1  # just above all of them
    for place in (highest, *(int(at) for at in reversed(np.flatnonzero(others)))):
        tp, fp = (int(counts[place]) if place < len(own) else 0 for counts in (hits, alarms))
        unlike = [float(spread[row, place]) if place < len(own) else 0.0 for row in (0, 1)]
        yield Point(
            name="", log_odds=edge(place, len(own)), tp=tp, fn=int(own.sum()) - tp, tn=int(others.sum()) - fp, fp=fp,
            specificity_spread=unlike[0], sensitivity_spread=unlike[1],
        )  # fmt: skip


def _at_specificity(every: list[Point], wanted: float) -> Point:
    """The most lenient that keeps it."""
    return [p for p in every if (p.specificity or 0) >= wanted][-1]


def _thinned(every: list[Point]) -> tuple[Point, ...]:
    """A bundle goes to everybody: some dozens of points, not one an image. Strict ones matter most."""
    if len(every) <= SHOWN:
        return tuple(every)
    place = np.unique(np.round(np.geomspace(1, len(every), SHOWN)).astype(int) - 1)
    return tuple(every[n] for n in place)
