"""Membership inference from the loss: was this example, or this patient, in the training data?

A model has a lower loss on its training data (Yeom et al. 2018, arXiv 1709.01604). All functions take losses (N,), or
differences to the losses of a reference model (the model before training), which removes the difficulty of an example.
Lower values mean member. The interval of the AUC is DeLong's (1988) with units as the independent clusters (Obuchowski
1997), because the cells of a patient are similar.
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

from pipeline.core.errors import DataError

FloatArray = NDArray[np.float64]
BATCH_SIZE = 1000  # examples
FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
NUM_THRESHOLDS = 200  # candidates
MIN_UNITS_PER_SIDE = 10  # with fewer the interval is 0 to 1


@dataclass(frozen=True)
class MembershipResult:
    auc: float
    auc_low: float  # 95 % interval of the AUC; 0 to 1 with too few units
    auc_high: float
    advantage: float  # TPR - FPR at the best threshold, at least 0; about 1 / sqrt(rows) by chance
    tpr_at_fpr: Mapping[float, float]  # FPR -> TPR, for rates of at least one nonmember
    num_members: int
    num_nonmembers: int
    unit: str


def compute_losses(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(N,) float64."""
    module.eval()
    with torch.no_grad():
        parts = [
            F.cross_entropy(module(a).double(), b, reduction="none")
            for a, b in zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)
        ]
    return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64)


def average_by_unit(losses: Tensor, units: Tensor) -> Tensor:
    """(U,): the mean loss of each unit, in ascending order of the units' numbers."""
    _, unit_index = units.unique(return_inverse=True)
    totals = torch.zeros(int(unit_index.max()) + 1, dtype=torch.float64).index_add_(0, unit_index, losses.double())
    return totals / torch.bincount(unit_index)


def evaluate_membership(
    member_losses: Tensor,
    nonmember_losses: Tensor,
    unit: str = "example",
    units: tuple[Tensor, Tensor] | None = None,
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
) -> MembershipResult:
    """How well losses separate members from nonmembers.

    `unit`: the name of what one row is. `units`: the unit numbers of the rows of both sides, if rows are clustered.
    """
    a, b = _to_finite_array(member_losses, "members"), _to_finite_array(nonmember_losses, "nonmembers")
    # (M,), (N,): share of the other side that is ordered correctly with respect to the row
    member_placements, nonmember_placements = _placements(a, b)
    auc = float(member_placements.mean())
    unit_pair = units or (None, None)
    low, high = _auc_interval(
        auc, _unit_deviations(member_placements, unit_pair[0]), _unit_deviations(nonmember_placements, unit_pair[1])
    )
    cumulative_rates = (np.searchsorted(np.sort(v), a, "right") / len(v) for v in (a, b))
    advantage = max(0.0, float(np.subtract(*cumulative_rates).max()))
    tpr_at_fpr = {
        false_positive_rate: _tpr_at_fpr(a, b, false_positive_rate)
        for false_positive_rate in false_positive_rates
        if false_positive_rate * len(b) >= 1
    }
    return MembershipResult(
        auc=auc,
        auc_low=low,
        auc_high=high,
        advantage=advantage,
        tpr_at_fpr=tpr_at_fpr,
        num_members=len(a),
        num_nonmembers=len(b),
        unit=unit,
    )


def epsilon_lower_bound(
    member_losses: Tensor, nonmember_losses: Tensor, delta: float, confidence: float = 0.95
) -> float:
    """The largest epsilon that a threshold's rates contradict: log((TPR - delta) / FPR) or its mirror.

    Each rate is at its Clopper-Pearson bound. The threshold is chosen on one half of the rows and evaluated on the
    other. This is weak evidence: the rows of one training run are not independent, and members may differ from
    nonmembers in more than membership. Give one row per unit.
    """
    a, b = _to_finite_array(member_losses, "members"), _to_finite_array(nonmember_losses, "nonmembers")
    rng = np.random.default_rng(0)
    (a, a_test), (b, b_test) = (np.array_split(rng.permutation(v), 2) for v in (a, b))
    if not len(a_test) or not len(b_test):
        return 0.0
    thresholds = np.unique(np.quantile(np.concatenate([a, b]), np.linspace(0, 1, NUM_THRESHOLDS), method="nearest"))
    best_threshold = max(thresholds, key=lambda threshold: _epsilon_at_threshold(a, b, threshold, delta, confidence))
    return max(0.0, _epsilon_at_threshold(a_test, b_test, best_threshold, delta, confidence))


def clopper_pearson(num_hits: int, num_trials: int, confidence: float) -> tuple[float, float]:
    """One-sided bounds below and above, each at this confidence."""
    low = float(stats.beta.ppf(1 - confidence, num_hits, num_trials - num_hits + 1)) if num_hits else 0.0
    high = float(stats.beta.ppf(confidence, num_hits + 1, num_trials - num_hits)) if num_hits < num_trials else 1.0
    return low, high


def _epsilon_at_threshold(a: FloatArray, b: FloatArray, threshold: float, delta: float, confidence: float) -> float:
    """Both claims rest on the same two bounds, each of which gets half of the error."""
    side_confidence = 1 - (1 - confidence) / 2
    tpr_bounds, fpr_bounds = (clopper_pearson(int((v <= threshold).sum()), len(v), side_confidence) for v in (a, b))
    ratios = ((tpr_bounds[0] - delta) / fpr_bounds[1], (1 - fpr_bounds[1] - delta) / (1 - tpr_bounds[0]))
    return max(math.log(r) if r > 0 else -math.inf for r in ratios)


def _to_finite_array(values: Tensor, description: str) -> FloatArray:
    array = values.detach().cpu().double().numpy()
    if not len(array) or not np.isfinite(array).all():
        raise DataError(
            f"{description}: {len(array)} losses, none or not all finite; give the losses of a model that was trained"
        )
    return array


def _placements(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Ties count one half."""

    def placement_values(v: FloatArray, reference: FloatArray) -> FloatArray:
        sorted_reference = np.sort(reference)
        below, not_above = (np.searchsorted(sorted_reference, v, side).astype(np.float64) for side in ("left", "right"))
        placements: FloatArray = 1 - (below + not_above) / (2 * len(sorted_reference))
        return placements

    return placement_values(a, b), 1 - placement_values(b, a)


def _unit_deviations(values: FloatArray, units: Tensor | None) -> FloatArray:
    """(U,): each unit's sum of deviations from the AUC, divided by the number of rows."""
    deviations: FloatArray = (values - values.mean()) / len(values)
    if units is None:
        return deviations
    _, unit_index = np.unique(units.cpu().numpy(), return_inverse=True)
    return np.bincount(unit_index, deviations).astype(np.float64)


def _auc_interval(auc: float, *sides: FloatArray) -> tuple[float, float]:
    min_units = min(map(len, sides))
    if min_units < MIN_UNITS_PER_SIDE:
        return 0.0, 1.0
    # with a smaller AUC, this many independent pairs are all ordered correctly with probability below 2.5 %
    extreme_auc = 0.025 ** (1 / min_units)
    if auc in (0.0, 1.0):
        return (extreme_auc, 1.0) if auc else (0.0, 1 - extreme_auc)
    variance = sum(len(s) / (len(s) - 1) * float((s**2).sum()) for s in sides)
    half_width = (
        1.96 * math.sqrt(variance) / (auc * (1 - auc))
    )  # of the log-odds, so that the interval stays between 0 and 1
    log_odds = math.log(auc / (1 - auc))
    return tuple(float(stats.logistic.cdf(log_odds + s * half_width)) for s in (-1, 1))  # type: ignore[return-value]


def _tpr_at_fpr(a: FloatArray, b: FloatArray, false_positive_rate: float) -> float:
    """The share of members below the threshold that at most this share of nonmembers is below."""
    num_allowed = math.floor(false_positive_rate * len(b) + 1e-9)
    return float((a < np.sort(b)[num_allowed]).mean()) if num_allowed < len(b) else 1.0
