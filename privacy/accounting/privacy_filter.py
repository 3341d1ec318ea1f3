"""Privacy filter of a data set: a charge is allowed while all charges together stay within (epsilon, delta).

One study that commits to its spending before its first step is a fixed composition, and what it charges is a prefix of
it, so the tightest accountant is valid. Several studies are chosen adaptively, each with knowledge of what the earlier
ones released, so they need a Rényi filter (Feldman and Zrnic 2021, arXiv 2008.11193; Lécuyer 2021, arXiv 2103.01379).
With R(a) the charged divergence and L the privacy loss so far, exp((a - 1) (L - R(a))) is a supermartingale for every
order a, and so is its mean over orders with fixed weights w(a). The charges are therefore (epsilon, delta)-private at
every stopping time if

    sum over a of  w(a) / c(a) * exp((a - 1) (epsilon - R(a)))  >=  1 / delta,    c(a) = (1 - 1/a)^(a-1) / a.

The best single order, chosen afterwards, would give a smaller epsilon than is proven. A study that fits the budget only
by the tightest accountant needs exclusive use of the data set: no other study may charge before or after it. Which rule
applies depends only on the study's commitment and the budget, never on the data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipeline.core.errors import BudgetError
from privacy.accounting.accountant import (
    RDP_ORDERS,
    DpEvent,
    FloatArray,
    PrivacySpent,
    compute_privacy_spent,
    log_conversion_factors,
    merge_events,
    renyi_divergences,
)

EPSILON_GRID = 2.0**-20  # the filter's epsilon is rounded up to it, so that more charges never give less
# times log(1/delta) / epsilon: range of (order - 1) that contains the best order when the budget is spent
BEST_ORDER_RANGE = (0.7, 2.5)
BEST_ORDER_WEIGHT = 0.9  # total weight of those orders; the others tighten values far below the budget
RDP_FILTER = "rdp filter"


@dataclass(frozen=True)
class FilterBudget:
    epsilon: float
    delta: float
    initial_epsilon: float | None = None  # if epsilon was changed since: the weights must not depend on the data

    def __post_init__(self) -> None:
        for epsilon in (self.epsilon, self.epsilon if self.initial_epsilon is None else self.initial_epsilon):
            if not 0 < epsilon < math.inf:
                raise BudgetError(f"a budget's epsilon {epsilon} must be a number over 0")
        if not 0 < self.delta < 1:
            raise BudgetError(f"a budget's delta {self.delta} must be between 0 and 1")


@dataclass(frozen=True)
class PlannedSpending:
    """The most that a study will spend, fixed before its first step. It may spend less and end early."""

    study_hash: str
    noise_multiplier: float
    sampling_rate: float
    steps_per_round: int
    max_participations: int

    def __post_init__(self) -> None:
        if min(self.steps_per_round, self.max_participations) < 1:
            raise BudgetError(f"study {self.study_hash} must commit to at least one round of one step")
        DpEvent(self.noise_multiplier, self.sampling_rate, self.steps_per_round)

    @property
    def round_event(self) -> DpEvent:
        return DpEvent(self.noise_multiplier, self.sampling_rate, self.steps_per_round)

    @property
    def total_event(self) -> DpEvent:
        return DpEvent(self.noise_multiplier, self.sampling_rate, self.steps_per_round * self.max_participations)


class PlanCharge(NamedTuple):
    study_hash: str
    event: DpEvent


@dataclass(frozen=True)
class FilterDecision:
    is_allowed: bool
    epsilon_after: float  # of all charges; unchanged if refused
    accountant: str  # "pld", "rdp" or RDP_FILTER
    epsilon_left: float
    reason: str


def check_charge(
    history: Sequence[tuple[str, DpEvent]],
    planned: Mapping[str, PlannedSpending],
    requested: tuple[str, DpEvent],
    budget: FilterBudget,
) -> FilterDecision:
    """Whether `requested` may be charged after `history`, the charges so far on this data set.

    `history` and `requested`: (study hash, event). `planned`: commitments by study hash.
    """
    spent_before = compute_spent(history, planned, budget)
    study_hash, event = requested
    num_charges = sum(charged_hash == study_hash for charged_hash, _ in history)
    problem = _commitment_problem(study_hash, event, planned.get(study_hash), num_charges) or _exclusivity_problem(
        study_hash, history, planned, budget
    )
    if problem is None:
        spent_after = _compute_spent([*history, requested], budget)
        spent_text = f"epsilon {spent_after.epsilon:.6g} of {budget.epsilon:g} at delta {budget.delta:g}"
        if spent_after.epsilon <= budget.epsilon:
            epsilon_spent = max(spent_before.epsilon, spent_after.epsilon)
            return FilterDecision(
                True, epsilon_spent, spent_after.accountant, budget.epsilon - epsilon_spent, f"spends {spent_text}"
            )
        problem = f"would spend {spent_text} (spent so far {spent_before.epsilon:.6g})"
    return FilterDecision(
        False, spent_before.epsilon, spent_before.accountant, max(0.0, budget.epsilon - spent_before.epsilon), problem
    )


def compute_spent(
    history: Sequence[tuple[str, DpEvent]], planned: Mapping[str, PlannedSpending], budget: FilterBudget
) -> PrivacySpent:
    """The privacy spent by the charges in `history` at the budget's delta."""
    num_charges: Counter[str] = Counter()
    for number, (study_hash, event) in enumerate(history, 1):
        problem = _commitment_problem(study_hash, event, planned.get(study_hash), num_charges[study_hash])
        if problem is not None:
            raise BudgetError(f"charge {number} breaks its commitment: {problem}; restore the ledger or the commitment")
        num_charges[study_hash] += 1
    return _compute_spent(history, budget)


def needs_exclusive_use(planned: PlannedSpending, budget: FilterBudget) -> bool:
    """Whether the study fits the budget only if no other study charges this data set."""
    return _filter_epsilon(merge_events([planned.total_event]), budget) > budget.epsilon


def _compute_spent(charges: Sequence[tuple[str, DpEvent]], budget: FilterBudget) -> PrivacySpent:
    events = merge_events([event for _, event in charges])
    if len({study_hash for study_hash, _ in charges}) <= 1:
        return compute_privacy_spent(events, budget.delta)
    return PrivacySpent(_filter_epsilon(events, budget), budget.delta, RDP_FILTER)


def _commitment_problem(
    study_hash: str, event: DpEvent, planned: PlannedSpending | None, num_charges: int
) -> str | None:
    """Why the charge is outside its study's commitment, or None."""
    if planned is None:
        return f"study {study_hash} has made no commitment; record its noise multiplier, sampling rate, steps and rounds first"
    round_event = planned.round_event
    if (event.noise_multiplier, event.sampling_rate) != (round_event.noise_multiplier, round_event.sampling_rate):
        return (
            f"study {study_hash} has committed to noise multiplier {round_event.noise_multiplier:g} at sampling rate "
            f"{round_event.sampling_rate:g}, not to {event.noise_multiplier:g} at {event.sampling_rate:g}; other settings are "
            "another study"
        )
    if not 1 <= event.steps <= round_event.steps:
        return f"study {study_hash} has committed to 1 to {round_event.steps} steps per round, not to {event.steps}"
    if num_charges >= planned.max_participations:
        return (
            f"study {study_hash} has used all its {planned.max_participations} rounds (a repeated round counts again)"
        )
    return None


def _exclusivity_problem(
    study_hash: str,
    history: Sequence[tuple[str, DpEvent]],
    planned: Mapping[str, PlannedSpending],
    budget: FilterBudget,
) -> str | None:
    """Why this study and another one cannot both charge the data set, or None."""
    other_hashes = sorted({charged_hash for charged_hash, _ in history} - {study_hash})
    reason = "needs exclusive use of the data set: together with other studies its schedule would exceed the budget"
    if other_hashes and needs_exclusive_use(planned[study_hash], budget):
        return (
            f"study {study_hash} {reason}, and {other_hashes[0]} has charged before; give it more noise or fewer rounds"
        )
    for other_hash in other_hashes:
        if needs_exclusive_use(planned[other_hash], budget):
            return f"study {other_hash} has charged, and {reason}; no other study may charge this data set"
    return None


@lru_cache(maxsize=2**14)
def _filter_epsilon(events: tuple[DpEvent, ...], budget: FilterBudget) -> float:
    """The smallest epsilon that satisfies the filter's condition."""
    if not events:
        return 0.0
    divergence = renyi_divergences(events)
    rdp_epsilon = compute_privacy_spent(events, budget.delta, "rdp").epsilon  # of the best single order
    if math.isinf(rdp_epsilon):
        return math.inf
    offsets = np.log(_order_weights(budget)) - log_conversion_factors(RDP_ORDERS)

    def is_satisfied(grid_index: int) -> bool:
        exponents = offsets + (RDP_ORDERS - 1) * (grid_index * EPSILON_GRID - divergence)
        return bool(np.logaddexp.reduce(exponents) >= -math.log(budget.delta))

    low = math.ceil(rdp_epsilon / EPSILON_GRID) - 1
    high = 2 * low + math.ceil(1 / EPSILON_GRID)
    while not is_satisfied(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_satisfied(middle) else (middle, high)
    return high * EPSILON_GRID


def _order_weights(budget: FilterBudget) -> FloatArray:
    """The weight of each of RDP_ORDERS, in proportion to the spacing of log(order - 1); they sum to 1."""
    scale = -math.log(budget.delta) / (budget.initial_epsilon or budget.epsilon)
    gaps: FloatArray = np.gradient(np.log(RDP_ORDERS - 1))
    best_order_gaps: FloatArray = np.where(
        (BEST_ORDER_RANGE[0] * scale <= RDP_ORDERS - 1) & (BEST_ORDER_RANGE[1] * scale >= RDP_ORDERS - 1), gaps, 0.0
    )
    uniform_weights: FloatArray = gaps / gaps.sum()
    return (
        BEST_ORDER_WEIGHT * best_order_gaps / best_order_gaps.sum() + (1 - BEST_ORDER_WEIGHT) * uniform_weights
        if best_order_gaps.any()
        else uniform_weights
    )
