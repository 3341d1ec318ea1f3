"""Confidence intervals by the bootstrap over whole units: cells of one patient are alike, so patients are drawn.

With few units such intervals are too narrow (of nominally 95 % some 82 with five units, 91 with nine, 94 with thirty),
so fewer than FEWEST get none. Draws depend on the seed and the units alone: two models on the same test examples are
drawn alike, so the draws of their difference are the difference of their draws.

Only a simulation has every example's score in one place; between hospitals only sums travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.coordinator.metrics import Focus

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Interval = list[float]  # [low, high], as JSON has it
DRAWS = 1000
LEVEL = 0.95
FEWEST = 10  # units; of curves, half as many with the class and half as many with others
CHUNK = 4_000_000  # numbers held at once


@dataclass(frozen=True)
class Answers:
    """Of N test examples; scores in the bins that also the sites' sums have, so that a score lies in its interval."""

    scores: Ints  # (N, C)
    guess: Ints  # (N,)
    y: Ints
    unit: Ints

    def where(self, chosen: NDArray[np.bool_]) -> Answers:
        return Answers(self.scores[chosen], self.guess[chosen], self.y[chosen], self.unit[chosen])


def intervals(told: Answers, focus: Focus, seed: int = 0) -> dict[str, Interval]:
    """metric: [low, high] of what `drawn` gives; undefined ones are left out."""
    found = drawn(told, focus, seed)
    return {metric: span for metric, values in found.items() if (span := _span(values)) is not None}


def drawn(told: Answers, focus: Focus, seed: int = 0, draws: int = DRAWS) -> dict[str, Floats]:
    """metric: (draws,), nan where undefined; nothing for too few units."""
    units, unit = np.unique(told.unit, return_inverse=True)
    if len(units) < FEWEST:
        return {}
    times, classes, y = _times(len(units), draws, seed), told.scores.shape[1], told.y
    found = _of_answers(told.guess, y, unit, times, classes)
    which = focus.positive if focus.positive is not None else 1 if classes == 2 else None
    if which is not None and min(len(np.unique(unit[y == which])), len(np.unique(unit[y != which]))) >= FEWEST // 2:
        curves = _of_curves(told.scores[:, which], y == which, unit, times, focus.specificity)
        named = ["positive_auroc", "positive_auprc", "sensitivity_at_specificity"]
        found |= dict(zip(named, curves, strict=True)) if focus.positive is not None else {"auroc": curves[0]}
    return found


def _times(units: int, draws: int, seed: int) -> Floats:
    """(D, U): how often each unit is drawn."""
    drawn = np.random.default_rng([seed, 0xB007]).integers(0, units, (draws, units))
    flat = drawn + np.arange(draws)[:, None] * units
    return np.bincount(flat.ravel(), minlength=draws * units).reshape(draws, units).astype(np.float64)


def _of_answers(guess: Ints, y: Ints, unit: Ints, times: Floats, classes: int) -> dict[str, Floats]:
    """Ratios of sums over units, so a product of matrices gives all draws."""
    size = (times.shape[1], classes)
    truth, hits = np.zeros(size), np.zeros(size)
    np.add.at(truth, (unit, y), 1)
    np.add.at(hits, (unit, y), guess == y)
    drawn_truth, drawn_hits = times @ truth, times @ hits  # (D, C)
    here = truth.sum(0) > 0  # a draw that lacks one of these classes has no balanced accuracy
    recall = np.divide(drawn_hits, drawn_truth, out=np.full_like(drawn_hits, np.nan), where=drawn_truth > 0)[:, here]
    return {"accuracy": drawn_hits.sum(1) / drawn_truth.sum(1), "balanced_accuracy": recall.mean(1)}


def _of_curves(score: Ints, own: NDArray[np.bool_], unit: Ints, times: Floats, specificity: float) -> list[Floats]:
    """AUROC, average precision and sensitivity of every draw; nan where a draw has one class only."""
    order = np.argsort(-score, kind="stable")
    score, own, unit = score[order], own[order], unit[order]
    last = np.flatnonzero(np.append(np.diff(score) != 0, True))  # ties end together
    parts = list(_curves(own, unit, last, times, specificity))
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _curves(
    own: NDArray[np.bool_], unit: Ints, last: Ints, times: Floats, specificity: float
) -> Iterator[tuple[Floats, Floats, Floats]]:
    for part in np.array_split(times, max(1, times.shape[0] * len(own) // CHUNK)):
        weight = part[:, unit]  # (d, N)
        tp = np.cumsum(weight * own, 1)[:, last]
        fp = np.cumsum(weight * ~own, 1)[:, last]
        with np.errstate(invalid="ignore", divide="ignore"):
            tpr, fpr = tp / tp[:, -1:], fp / fp[:, -1:]
            gain = np.diff(tpr, prepend=0.0)
            precision = np.where(tp + fp > 0, tp / (tp + fp), 0)
        undefined = (tp[:, -1] == 0) | (fp[:, -1] == 0)
        area = np.trapezoid(np.pad(tpr, ((0, 0), (1, 0))), np.pad(fpr, ((0, 0), (1, 0))), axis=1)
        reached = np.where(fpr <= 1 - specificity + 1e-12, tpr, 0).max(1)
        yield tuple(np.where(undefined, np.nan, values) for values in (area, (gain * precision).sum(1), reached))  # type: ignore[misc]


def _span(values: Floats) -> Interval | None:
    known = values[np.isfinite(values)]
    if len(known) < len(values) / 2:
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(low), float(high)]
