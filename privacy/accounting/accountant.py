"""How much privacy a run of noisy steps has spent: epsilon at a given delta, by three accountants.

A step is the Gaussian mechanism on a Poisson sample of the units. Neighbours differ by one unit, added or removed.
`rdp` composes Rényi divergences (Mironov et al. 2019, arXiv 1908.10530) and converts them by Balle et al. 2020, arXiv
1905.09982, theorem 21. `pld` composes privacy loss distributions that dominate the step's in both directions
(Doroshenko et al. 2022, arXiv 2207.04380). Both bound epsilon from above. `prv` (Gopi et al. 2021, arXiv 2106.02848)
gives the upper end of its error interval, but Opacus has only the direction in which a unit is removed, and the worse
direction of one step need not be the worse of many (Lebeda et al. 2024, arXiv 2405.20769): it is a check, and no part
of `tightest`. Where a numerical accountant does not reach (epsilon over 100, `pld` with delta under 1e-8), `rdp`
answers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from numpy.typing import NDArray
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from pipeline.core.errors import BadBudget

How = Literal["rdp", "prv", "pld", "tightest"]
Floats = NDArray[np.float64]

ORDERS: Floats = np.array([*RDPAccountant.DEFAULT_ALPHAS, *(round(64 * 1.1**k) for k in range(29))], dtype=np.float64)
DUST = 1e-12  # Opacus ends its series for a step's moment at e^-30, so the moment may be that much too small
LARGEST = 100.0  # epsilon; beyond it nobody needs more digits
CELLS = 2**16  # of one step's privacy loss distribution; 16 times as many after composition
FINE = 24  # cells in a standard deviation of one step's loss: epsilon is at most 0.1 % too large
ROUNDING = 1e-10  # ten times what Fourier transforms were seen to add to delta or take from it, up to 100,000 steps
NOISES = (1e-2, 1e4)  # between which `noise_for` looks


@dataclass(frozen=True)
class Event:
    """`steps` releases with noise of `noise` times the sensitivity, each on a sample of every unit at `rate`."""

    noise: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise BadBudget(f"noise {self.noise} must be a number from 0; it is in units of the sensitivity")
        if not 0 < self.rate <= 1:
            raise BadBudget(f"rate {self.rate} must be over 0 and at most 1; it is a unit's chance to be in a step")
        if type(self.steps) is not int or self.steps < 0:
            raise BadBudget(f"steps {self.steps!r} must be a whole number from 0")


@dataclass(frozen=True)
class Spent:
    epsilon: float
    delta: float
    how: str  # the accountant that gave epsilon


def epsilon(events: Iterable[Event], delta: float, how: How = "tightest") -> float:
    return account(events, delta, how).epsilon


def account(events: Iterable[Event], delta: float, how: How = "tightest") -> Spent:
    """What the events spend together. More steps of the same events never spend less (`prv` apart)."""
    if not 0 < delta < 1:
        raise BadBudget(f"delta {delta} must lie between 0 and 1; well under one over the number of units is usual")
    return _account(merged(events), float(delta), how)


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """One event for each noise and rate, in their order."""
    steps: dict[tuple[float, float], int] = {}
    for event in events:
        kind = float(event.noise), float(event.rate)
        steps[kind] = steps.get(kind, 0) + event.steps
    return tuple(Event(*kind, count) for kind, count in sorted(steps.items()) if count)


def renyi(events: Iterable[Event]) -> Floats:
    """Rényi divergence of all events together at each of ORDERS."""
    total: Floats = np.zeros_like(ORDERS)
    for event in events:
        total = total + event.steps * _step_renyi(float(event.noise), float(event.rate))
    return total


def log_slack(orders: Floats) -> Floats:
    """log c(a), the smallest with 1 - e^-y <= c(a) e^((a - 1) y) for all y.

    Divergence R at order a then gives delta = c(a) e^((a - 1) (R - epsilon)).
    """
    return (orders - 1) * np.log1p(-1 / orders) - np.log(orders)


def noise_for(epsilon: float, delta: float, rate: float, steps: int, how: How = "tightest") -> float:
    """The smallest noise, to one in a thousand, with which so many steps spend at most `epsilon`."""
    if not 0 < epsilon < math.inf:
        raise BadBudget(f"epsilon {epsilon} must be a number over 0")
    if steps < 1:
        raise BadBudget(f"{steps} steps need no noise; ask for at least one")

    def enough(noise: float) -> bool:
        return account([Event(noise, rate, steps)], delta, how).epsilon <= epsilon

    least, most = NOISES
    high = 1.0
    while not enough(high):
        if high >= most:
            raise BadBudget(
                f"epsilon {epsilon:g} at delta {delta:g} is out of reach: {steps} steps at rate {rate:g} spend more "
                f"even with noise {high:g}; take fewer steps, a smaller rate or a larger budget"
            )
        high = min(most, high * 2)
    low = high / 2
    while low > least and enough(low):
        low, high = low / 2, low
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def curve(event: Event, turns: int, delta: float, how: How = "tightest") -> list[float]:
    """Epsilon after each of `turns` repetitions of `event`."""
    spent = (
        account([Event(event.noise, event.rate, event.steps * turn)], delta, how).epsilon
        for turn in range(1, turns + 1)
    )
    return list(accumulate(spent, max))


@lru_cache(maxsize=2**16)
def _account(events: tuple[Event, ...], delta: float, how: How) -> Spent:
    rdp = Spent(_by_rdp(events, delta), delta, "rdp")
    if how == "rdp" or not events or rdp.epsilon > LARGEST:
        return rdp
    if how == "prv":
        found = _by_prv(events, delta, rdp.epsilon)
        return rdp if found is None else Spent(found, delta, "prv")
    found = _by_pld(events, delta, rdp.epsilon)
    if found is None or (how == "tightest" and found > rdp.epsilon):
        return rdp
    return Spent(found, delta, "pld")


def _by_rdp(events: tuple[Event, ...], delta: float) -> float:
    if not events:
        return 0.0
    return max(0.0, float((renyi(events) + (log_slack(ORDERS) - math.log(delta)) / (ORDERS - 1)).min()))


@lru_cache(maxsize=2**12)
def _step_renyi(noise: float, rate: float) -> Floats:
    if noise == 0:
        return np.full_like(ORDERS, math.inf)
    single = [_at_order(noise, rate, float(order)) for order in ORDERS]
    found: Floats = np.maximum(single, 0) + DUST / (ORDERS - 1)
    found.setflags(write=False)
    return found


def _at_order(noise: float, rate: float, order: float) -> float:
    """Infinite where the series breaks down: that order then proves nothing."""
    try:
        found = float(compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=order))
    except (ValueError, OverflowError):
        return math.inf
    return math.inf if math.isnan(found) else found


def _by_pld(events: tuple[Event, ...], delta: float, roughly: float) -> float | None:
    if delta < 100 * ROUNDING:
        return None
    cell = max(min(_wanted(event) for event in events), max(_width(event) for event in events) * 2 / CELLS)
    cell = 2.0 ** math.floor(math.log2(cell))
    if (roughly + max(_width(event) for event in events)) / cell > 16 * CELLS:
        return None
    composed, *others = (_step_pld(e.noise, e.rate, cell).self_compose(e.steps) for e in events)
    for other in others:
        composed = composed.compose(other)
    return max(0.0, float(composed.get_epsilon_for_delta(delta - ROUNDING)))


def _wanted(event: Event) -> float:
    """A fraction of the standard deviation of one step's privacy loss (roughly)."""
    deviation = event.rate * math.sqrt(math.expm1(min(event.noise**-2, 100.0)))
    return min(1 / event.noise, deviation) / FINE


def _width(event: Event) -> float:
    """Of one step's privacy losses, all but e^-50 of their mass: 10 standard deviations of the noise."""
    loss = (20 * event.noise + 1) / (2 * event.noise**2)
    return max(0.0, loss + math.log(event.rate)) + min(loss, 1.0)


@lru_cache(maxsize=64)
def _step_pld(noise: float, rate: float, cell: float) -> Any:
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=cell
    )


def _by_prv(events: tuple[Event, ...], delta: float, roughly: float) -> float | None:
    """To half a percent, or as fine as a million points allow."""
    accountant = PRVAccountant()
    accountant.history = [(event.noise, event.rate, event.steps) for event in events]
    points = 2 * (roughly + 6) * math.sqrt(sum(event.steps for event in events) * math.log(12e3 / delta) / 2)
    error = max(0.005 * roughly, points / 2**20)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = float(accountant.get_epsilon(delta, eps_error=error))
    except (RuntimeError, ValueError, OverflowError):  # its own checks of the discretisation
        return None
    return max(0.0, found) if math.isfinite(found) else None
