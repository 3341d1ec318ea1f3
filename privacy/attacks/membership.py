"""Membership inference: was this example, or this patient, among the training data? Guessed from the loss.

A model has a lower loss on what it was trained on (Yeom et al. 2018, arXiv 1709.01604). Everything here takes losses
(N,), or differences to a reference model's losses (the model before training): what is hard for any model is then no
sign of a stranger. Lower means member. The interval of the AUC is DeLong's (1988) with whole units as the independent
pieces (Obuchowski 1997), for a patient's cells are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import BadData

Floats = NDArray[np.float64]
CHUNK = 1000  # examples at once
FALSE_ALARMS = (0.1, 0.01, 0.001)
THRESHOLDS = 200  # from which one is chosen
FEWEST = 10  # units on each side; of fewer nothing is said


@dataclass(frozen=True)
class Membership:
    auc: float
    low: float  # 95 % interval of the AUC; 0 to 1 with too few units
    high: float
    advantage: float  # hits minus false alarms at the best threshold: by chance about 1 / sqrt(rows), never below 0
    tpr_at: Mapping[float, float]  # false alarms: hits; only where one of the others is enough for such a rate
    members: int
    others: int
    unit: str


def losses(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(N,) float64."""
    module.eval()
    with torch.no_grad():
        parts = [
            F.cross_entropy(module(a).double(), b, reduction="none")
            for a, b in zip(x.split(CHUNK), y.split(CHUNK), strict=True)
        ]
    return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64)


def by_unit(losses: Tensor, units: Tensor) -> Tensor:
    """(U,): the mean over each unit's examples, in the order of the units' numbers."""
    _, place = units.unique(return_inverse=True)
    totals = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place, losses.double())
    return totals / torch.bincount(place)


def membership(
    members: Tensor,
    others: Tensor,
    unit: str = "example",
    units: tuple[Tensor, Tensor] | None = None,
    false_alarms: Sequence[float] = FALSE_ALARMS,
) -> Membership:
    """How well losses tell members from others. `unit` names what a row is; `units`: to whom the rows belong."""
    a, b = _finite(members, "members"), _finite(others, "others")
    over, under = _placements(a, b)  # (M,), (O,): the share of the other side that a row is on the right side of
    auc = float(over.mean())
    whose = units or (None, None)
    low, high = _interval(auc, _clusters(over, whose[0]), _clusters(under, whose[1]))
    up_to_each = (np.searchsorted(np.sort(v), a, "right") / len(v) for v in (a, b))
    advantage = max(0.0, float(np.subtract(*up_to_each).max()))
    told = {rate: _hits(a, b, rate) for rate in false_alarms if rate * len(b) >= 1}
    return Membership(auc, low, high, advantage, told, len(a), len(b), unit)


def epsilon_low(members: Tensor, others: Tensor, delta: float, confidence: float = 0.95) -> float:
    """The epsilon that a threshold's hits and false alarms would contradict: log((TPR - delta) / FPR) and its mirror,
    each rate at its Clopper-Pearson bound.

    The threshold is chosen on one half of the rows and judged on the other. Weak evidence: of one training run the rows
    are not independent draws, and members may differ from others by more than their membership. Give one row a unit.
    """
    a, b = _finite(members, "members"), _finite(others, "others")
    dice = np.random.default_rng(0)
    (a, a_judged), (b, b_judged) = (np.array_split(dice.permutation(v), 2) for v in (a, b))
    if not len(a_judged) or not len(b_judged):
        return 0.0
    thresholds = np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0, 1, THRESHOLDS), method="nearest"))
    chosen = max(thresholds, key=lambda at: _epsilon(a, b, at, delta, confidence))
    return max(0.0, _epsilon(a_judged, b_judged, chosen, delta, confidence))


def clopper_pearson(hits: int, n: int, confidence: float) -> tuple[float, float]:
    """One-sided bounds below and above, each at this confidence."""
    low = float(stats.beta.ppf(1 - confidence, hits, n - hits + 1)) if hits else 0.0
    high = float(stats.beta.ppf(confidence, hits + 1, n - hits)) if hits < n else 1.0
    return low, high


def _epsilon(a: Floats, b: Floats, threshold: float, delta: float, confidence: float) -> float:
    """Both claims rest on the same two bounds, each of which gets half of the error."""
    sure = 1 - (1 - confidence) / 2
    hits, alarms = (clopper_pearson(int((v <= threshold).sum()), len(v), sure) for v in (a, b))
    ratios = ((hits[0] - delta) / alarms[1], (1 - alarms[1] - delta) / (1 - hits[0]))
    return max(math.log(r) if r > 0 else -math.inf for r in ratios)


def _finite(values: Tensor, who: str) -> Floats:
    found = values.detach().cpu().double().numpy()
    if not len(found) or not np.isfinite(found).all():
        raise BadData(f"{who}: {len(found)} losses, not all of them finite; the model must have been trained soundly")
    return found


def _placements(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Ties count one half."""

    def share(v: Floats, against: Floats) -> Floats:
        there = np.sort(against)
        below, not_above = (np.searchsorted(there, v, side).astype(np.float64) for side in ("left", "right"))
        found: Floats = 1 - (below + not_above) / (2 * len(there))
        return found

    return share(a, b), 1 - share(b, a)


def _clusters(values: Floats, units: Tensor | None) -> Floats:
    """(U,): each unit's sum of deviations from the AUC, as a share of the rows."""
    off: Floats = (values - values.mean()) / len(values)
    if units is None:
        return off
    _, place = np.unique(units.cpu().numpy(), return_inverse=True)
    return np.bincount(place, off).astype(np.float64)


def _interval(auc: float, *sides: Floats) -> tuple[float, float]:
    fewest = min(map(len, sides))
    if fewest < FEWEST:
        return 0.0, 1.0
    edge = 0.025 ** (1 / fewest)  # an AUC below it would hardly order that many independent pairs without a fault
    if auc in (0.0, 1.0):
        return (edge, 1.0) if auc else (0.0, 1 - edge)
    variance = sum(len(s) / (len(s) - 1) * float((s**2).sum()) for s in sides)
    reach = 1.96 * math.sqrt(variance) / (auc * (1 - auc))  # on the log-odds, which keep it between 0 and 1
    odds = math.log(auc / (1 - auc))
    return tuple(float(stats.logistic.cdf(odds + s * reach)) for s in (-1, 1))  # type: ignore[return-value]


def _hits(a: Floats, b: Floats, rate: float) -> float:
    """Of the members, below a threshold that at most this share of the others is below."""
    allowed = math.floor(rate * len(b) + 1e-9)
    return float((a < np.sort(b)[allowed]).mean()) if allowed < len(b) else 1.0
