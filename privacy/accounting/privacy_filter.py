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

from pipeline.core.errors import BadBudget
from privacy.accounting.accountant import ORDERS, Event, Floats, Spent, account, log_slack, merged, renyi

GRID = 2.0**-20  # the filter's epsilon is rounded up to it, so that more charges never show less
NEAR = (0.7, 2.5)  # times log(1/delta) / epsilon: the orders less one among which the best one lies at the budget
SHARE = 0.9  # of the weight lies on those orders; the rest serves figures far below the budget
FILTER = "rdp filter"


@dataclass(frozen=True)
class Budget:
    epsilon: float
    delta: float
    first: float | None = None  # epsilon before the first charge, if it was changed since: weights may not follow data

    def __post_init__(self) -> None:
        for number in (self.epsilon, self.epsilon if self.first is None else self.first):
            if not 0 < number < math.inf:
                raise BadBudget(f"a budget's epsilon {number} must be a number over 0")
        if not 0 < self.delta < 1:
            raise BadBudget(f"a budget's delta {self.delta} must lie between 0 and 1")


@dataclass(frozen=True)
class Commitment:
    """What a plan will do at most, fixed before its first step. It may do less, and end early."""

    plan: str
    noise: float
    rate: float
    steps_per_turn: int
    turns: int

    def __post_init__(self) -> None:
        if min(self.steps_per_turn, self.turns) < 1:
            raise BadBudget(f"plan {self.plan} must commit to at least one turn of one step")
        Event(self.noise, self.rate, self.steps_per_turn)

    @property
    def turn(self) -> Event:
        return Event(self.noise, self.rate, self.steps_per_turn)

    @property
    def whole(self) -> Event:
        return Event(self.noise, self.rate, self.steps_per_turn * self.turns)


class Charge(NamedTuple):
    plan: str
    event: Event


@dataclass(frozen=True)
class Decision:
    allowed: bool
    epsilon_after: float  # as before, if refused
    how: str  # pld, rdp, or `FILTER`
    left: float
    reason: str


def decide(
    history: Sequence[tuple[str, Event]],
    commitments: Mapping[str, Commitment],
    wanted: tuple[str, Event],
    budget: Budget,
) -> Decision:
    """May `wanted` be charged after `history`, the charges allowed so far on this data set?"""
    before = spent(history, commitments, budget)
    plan, event = wanted
    taken = sum(charged == plan for charged, _ in history)
    problem = _breach(plan, event, commitments.get(plan), taken) or _crowd(plan, history, commitments, budget)
    if problem is None:
        after = _spent([*history, wanted], budget)
        figures = f"epsilon {after.epsilon:.6g} of {budget.epsilon:g} at delta {budget.delta:g}"
        if after.epsilon <= budget.epsilon:
            reached = max(before.epsilon, after.epsilon)
            return Decision(True, reached, after.how, budget.epsilon - reached, f"spends {figures}")
        problem = f"would spend {figures} (spent so far {before.epsilon:.6g})"
    return Decision(False, before.epsilon, before.how, max(0.0, budget.epsilon - before.epsilon), problem)


def spent(history: Sequence[tuple[str, Event]], commitments: Mapping[str, Commitment], budget: Budget) -> Spent:
    """What the allowed charges have spent at the budget's delta."""
    taken: Counter[str] = Counter()
    for number, (plan, event) in enumerate(history, 1):
        problem = _breach(plan, event, commitments.get(plan), taken[plan])
        if problem is not None:
            raise BadBudget(f"charge {number} breaks its commitment: {problem}; restore the ledger or the commitment")
        taken[plan] += 1
    return _spent(history, budget)


def alone(commitment: Commitment, budget: Budget) -> bool:
    """Does the plan need the data set for itself?"""
    return _filtered(merged([commitment.whole]), budget) > budget.epsilon


def _spent(charges: Sequence[tuple[str, Event]], budget: Budget) -> Spent:
    events = merged(event for _, event in charges)
    if len({plan for plan, _ in charges}) <= 1:
        return account(events, budget.delta)
    return Spent(_filtered(events, budget), budget.delta, FILTER)


def _breach(plan: str, event: Event, commitment: Commitment | None, taken: int) -> str | None:
    """How a charge leaves its plan's commitment."""
    if commitment is None:
        return f"plan {plan} has made no commitment; register its noise, rate, steps and turns first"
    promised = commitment.turn
    if (event.noise, event.rate) != (promised.noise, promised.rate):
        return (
            f"plan {plan} has committed to noise {promised.noise:g} at rate {promised.rate:g}, "
            f"not to {event.noise:g} at {event.rate:g}; another setting is another plan"
        )
    if not 1 <= event.steps <= promised.steps:
        return f"plan {plan} has committed to 1 to {promised.steps} steps a turn, not to {event.steps}"
    if taken >= commitment.turns:
        return f"plan {plan} has used all its {commitment.turns} turns (one that is repeated counts again)"
    return None


def _crowd(
    plan: str, history: Sequence[tuple[str, Event]], commitments: Mapping[str, Commitment], budget: Budget
) -> str | None:
    """Who is in whose way."""
    others = sorted({charged for charged, _ in history} - {plan})
    needs = "needs the data set for itself: with other plans its whole schedule would not fit"
    if others and alone(commitments[plan], budget):
        return f"plan {plan} {needs}, and {others[0]} has charged before; give it more noise or fewer turns"
    for other in others:
        if alone(commitments[other], budget):
            return f"plan {other} has charged, and {needs}; nobody else may charge this data set any more"
    return None


@lru_cache(maxsize=2**14)
def _filtered(events: tuple[Event, ...], budget: Budget) -> float:
    """The smallest epsilon for which the filter's condition holds."""
    if not events:
        return 0.0
    divergence = renyi(events)
    least = account(events, budget.delta, "rdp").epsilon  # of the best order alone
    if math.isinf(least):
        return math.inf
    offsets = np.log(_weights(budget)) - log_slack(ORDERS)

    def holds(cell: int) -> bool:
        exponents = offsets + (ORDERS - 1) * (cell * GRID - divergence)
        return bool(np.logaddexp.reduce(exponents) >= -math.log(budget.delta))

    low = math.ceil(least / GRID) - 1
    high = 2 * low + math.ceil(1 / GRID)
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high * GRID


def _weights(budget: Budget) -> Floats:
    """Of ORDERS; they add up to 1. In proportion to the orders' distance, on a scale of log(order - 1)."""
    scale = -math.log(budget.delta) / (budget.first or budget.epsilon)
    gaps: Floats = np.gradient(np.log(ORDERS - 1))
    near: Floats = np.where((NEAR[0] * scale <= ORDERS - 1) & (NEAR[1] * scale >= ORDERS - 1), gaps, 0.0)
    everywhere: Floats = gaps / gaps.sum()
    return SHARE * near / near.sum() + (1 - SHARE) * everywhere if near.any() else everywhere
