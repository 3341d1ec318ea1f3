"""The filter in front of a data set: a charge is allowed while all charges together stay within (epsilon, delta).

One plan, committed to before its first step, is a fixed composition, and whatever it does is a prefix of it: the
tightest accountant holds. Several plans are chosen one after the other, each knowing what the earlier ones released.
For them a Rényi filter holds (Feldman and Zrnic 2021, arXiv 2008.11193; Lécuyer 2021, arXiv 2103.01379): with R(a) the
charged divergence and L the privacy loss so far, exp((a - 1) (L - R(a))) is a supermartingale for every order a, so its
mean over orders with weights w(a), fixed beforehand, is one as well. It follows that the charges are (epsilon,
delta)-private, whenever they end, if

    sum over a of  w(a) / c(a) * exp((a - 1) (epsilon - R(a)))  >=  1 / delta,    c(a) = (1 - 1/a)^(a-1) / a.

The best order alone, chosen after the fact, would promise less epsilon than this proves. A plan that fits the budget
only by the tightest accountant has the data set for itself: no other may charge before it or after it. Which rule
holds for a plan is known from its commitment and the budget alone, never from the data.
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

EPSILON_GRID = 2.0**-20  # the filter's epsilon is rounded up to it, so that more charges never show less
BEST_ORDER_RANGE = (
    0.7,
    2.5,
)  # times log(1/delta) / epsilon: the orders less one among which the best one lies at the budget
BEST_ORDER_WEIGHT = 0.9  # of the weight lies on those orders; the rest serves figures far below the budget
RDP_FILTER = "rdp filter"


@dataclass(frozen=True)
class FilterBudget:
    epsilon: float
    delta: float
    initial_epsilon: float | None = (
        None  # epsilon before the first charge, if it was changed since: weights may not follow data
    )

    def __post_init__(self) -> None:
        for epsilon in (self.epsilon, self.epsilon if self.initial_epsilon is None else self.initial_epsilon):
            if not 0 < epsilon < math.inf:
                raise BudgetError(f"a budget's epsilon {epsilon} must be a number over 0")
        if not 0 < self.delta < 1:
            raise BudgetError(f"a budget's delta {self.delta} must lie between 0 and 1")


@dataclass(frozen=True)
class PlannedSpending:
    """What a plan will do at most, fixed before its first step. It may do less, and end early."""

    study_hash: str
    noise_multiplier: float
    sampling_rate: float
    steps_per_round: int
    max_participations: int

    def __post_init__(self) -> None:
        if min(self.steps_per_round, self.max_participations) < 1:
            raise BudgetError(f"plan {self.study_hash} must commit to at least one turn of one step")
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
    epsilon_after: float  # as before, if refused
    accountant: str  # pld, rdp, or `FILTER`
    epsilon_left: float
    reason: str


def check_charge(
    history: Sequence[tuple[str, DpEvent]],
    planned: Mapping[str, PlannedSpending],
    requested: tuple[str, DpEvent],
    budget: FilterBudget,
) -> FilterDecision:
    """May `wanted` be charged after `history`, the charges allowed so far on this data set?"""
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
    """What the allowed charges have spent at the budget's delta."""
    num_charges: Counter[str] = Counter()
    for number, (study_hash, event) in enumerate(history, 1):
        problem = _commitment_problem(study_hash, event, planned.get(study_hash), num_charges[study_hash])
        if problem is not None:
            raise BudgetError(f"charge {number} breaks its commitment: {problem}; restore the ledger or the commitment")
        num_charges[study_hash] += 1
    return _compute_spent(history, budget)


def needs_exclusive_use(planned: PlannedSpending, budget: FilterBudget) -> bool:
    """Does the plan need the data set for itself?"""
    return _filter_epsilon(merge_events([planned.total_event]), budget) > budget.epsilon


def _compute_spent(charges: Sequence[tuple[str, DpEvent]], budget: FilterBudget) -> PrivacySpent:
    events = merge_events(event for _, event in charges)
    if len({study_hash for study_hash, _ in charges}) <= 1:
        return compute_privacy_spent(events, budget.delta)
    return PrivacySpent(_filter_epsilon(events, budget), budget.delta, RDP_FILTER)


def _commitment_problem(
    study_hash: str, event: DpEvent, planned: PlannedSpending | None, num_charges: int
) -> str | None:
    """How a charge leaves its plan's commitment."""
    if planned is None:
        return f"plan {study_hash} has made no commitment; register its noise, rate, steps and turns first"
    round_event = planned.round_event
    if (event.noise_multiplier, event.sampling_rate) != (round_event.noise_multiplier, round_event.sampling_rate):
        return (
            f"plan {study_hash} has committed to noise {round_event.noise_multiplier:g} at rate {round_event.sampling_rate:g}, "
            f"not to {event.noise_multiplier:g} at {event.sampling_rate:g}; another setting is another plan"
        )
    if not 1 <= event.steps <= round_event.steps:
        return f"plan {study_hash} has committed to 1 to {round_event.steps} steps a turn, not to {event.steps}"
    if num_charges >= planned.max_participations:
        return (
            f"plan {study_hash} has used all its {planned.max_participations} turns (one that is repeated counts again)"
        )
    return None


def _exclusivity_problem(
    study_hash: str,
    history: Sequence[tuple[str, DpEvent]],
    planned: Mapping[str, PlannedSpending],
    budget: FilterBudget,
) -> str | None:
    """Who is in whose way."""
    other_hashes = sorted({charged_hash for charged_hash, _ in history} - {study_hash})
    reason = "needs the data set for itself: with other plans its whole schedule would not fit"
    if other_hashes and needs_exclusive_use(planned[study_hash], budget):
        return (
            f"plan {study_hash} {reason}, and {other_hashes[0]} has charged before; give it more noise or fewer turns"
        )
    for other_hash in other_hashes:
        if needs_exclusive_use(planned[other_hash], budget):
            return f"plan {other_hash} has charged, and {reason}; nobody else may charge this data set any more"
    return None


@lru_cache(maxsize=2**14)
def _filter_epsilon(events: tuple[DpEvent, ...], budget: FilterBudget) -> float:
    """The smallest epsilon for which the filter's condition holds."""
    if not events:
        return 0.0
    divergence = renyi_divergences(events)
    rdp_epsilon = compute_privacy_spent(events, budget.delta, "rdp").epsilon  # of the best order alone
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
    """Of ORDERS; they add up to 1. In proportion to the orders' distance, on a scale of log(order - 1)."""
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
