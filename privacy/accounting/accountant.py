"""Epsilon of a sequence of noisy steps at a given delta, by three accountants.

A step is the Gaussian mechanism on a Poisson sample of the units. Neighbouring data sets differ by one unit, added or
removed.

- `rdp` composes Rényi divergences (Mironov et al. 2019, arXiv 1908.10530) and converts them by Balle et al. 2020,
  arXiv 1905.09982, theorem 21. It is an upper bound of epsilon.
- `pld` composes privacy loss distributions that dominate the step's in both directions (Doroshenko et al. 2022, arXiv
  2207.04380). It is an upper bound of epsilon.
- `prv` (Gopi et al. 2021, arXiv 2106.02848) gives the upper end of its error interval. Opacus implements only the
  direction in which a unit is removed, and the worse direction of one step may not be the worse of many (Lebeda et al.
  2024, arXiv 2405.20769), so `prv` serves as a check and `tightest` does not use it.

`rdp` also covers what a numerical accountant cannot compute: epsilon over 100, and `pld` with delta below 1e-8.
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

from pipeline.core.errors import BudgetError

AccountantName = Literal["rdp", "prv", "pld", "tightest"]
FloatArray = NDArray[np.float64]

RDP_ORDERS: FloatArray = np.array(
    [*RDPAccountant.DEFAULT_ALPHAS, *(round(64 * 1.1**k) for k in range(29))], dtype=np.float64
)
RDP_SERIES_ERROR = 1e-12  # Opacus ends its series for a step's moment at e^-30, so the moment may be too small by this
MAX_EPSILON = 100.0  # above it only `rdp` is computed
MAX_PLD_CELLS = 2**16  # of one step's privacy loss distribution; 16 times as many after composition
PLD_CELLS_PER_STD = 24  # per standard deviation of one step's loss: epsilon is at most 0.1 % too large
# ten times the largest observed error of delta by Fourier transforms, up to 100,000 steps
FFT_ROUNDING_ERROR = 1e-10
NOISE_MULTIPLIER_RANGE = (1e-2, 1e4)  # searched by `calibrate_noise_multiplier`


@dataclass(frozen=True)
class DpEvent:
    """`steps` Gaussian mechanisms, each on a Poisson sample of the units.

    `noise_multiplier`: standard deviation in units of the sensitivity; `sampling_rate`: a unit's probability per step.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise BudgetError(
                f"noise multiplier {self.noise_multiplier} must be a number from 0; it is in units of the sensitivity"
            )
        if not 0 < self.sampling_rate <= 1:
            raise BudgetError(
                f"sampling rate {self.sampling_rate} must be over 0 and at most 1; it is a unit's probability to be in a step"
            )
        if type(self.steps) is not int or self.steps < 0:
            raise BudgetError(f"steps {self.steps!r} must be a whole number from 0")


@dataclass(frozen=True)
class PrivacySpent:
    epsilon: float
    delta: float
    accountant: str  # the accountant that gave epsilon


def compute_epsilon(events: Iterable[DpEvent], delta: float, accountant: AccountantName = "tightest") -> float:
    return compute_privacy_spent(events, delta, accountant).epsilon


def compute_privacy_spent(
    events: Iterable[DpEvent], delta: float, accountant: AccountantName = "tightest"
) -> PrivacySpent:
    """The privacy spent by all events together. More steps of the same events never spend less (except with `prv`)."""
    if not 0 < delta < 1:
        raise BudgetError(f"delta {delta} must be between 0 and 1; use much less than one over the number of units")
    return _compute_cached(merge_events(events), float(delta), accountant)


def merge_events(events: Iterable[DpEvent]) -> tuple[DpEvent, ...]:
    """One event for each noise multiplier and sampling rate, sorted."""
    steps_by_event: dict[tuple[float, float], int] = {}
    for event in events:
        event_key = float(event.noise_multiplier), float(event.sampling_rate)
        steps_by_event[event_key] = steps_by_event.get(event_key, 0) + event.steps
    return tuple(DpEvent(*event_key, num_steps) for event_key, num_steps in sorted(steps_by_event.items()) if num_steps)


def renyi_divergences(events: Iterable[DpEvent]) -> FloatArray:
    """The total Rényi divergence of the events at each of RDP_ORDERS."""
    total: FloatArray = np.zeros_like(RDP_ORDERS)
    for event in events:
        total = total + event.steps * _step_divergences(float(event.noise_multiplier), float(event.sampling_rate))
    return total


def log_conversion_factors(orders: FloatArray) -> FloatArray:
    """log c(a), with the smallest c(a) such that 1 - e^-y <= c(a) e^((a - 1) y) for all y.

    Divergence R at order a then gives delta = c(a) e^((a - 1) (R - epsilon)).
    """
    return (orders - 1) * np.log1p(-1 / orders) - np.log(orders)


def calibrate_noise_multiplier(
    epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: AccountantName = "tightest"
) -> float:
    """The smallest noise multiplier, to 0.1 %, with which the steps spend at most `epsilon`."""
    if not 0 < epsilon < math.inf:
        raise BudgetError(f"epsilon {epsilon} must be a number over 0")
    if steps < 1:
        raise BudgetError(f"{steps} steps need no noise; give at least one step")

    def is_within_budget(noise_multiplier: float) -> bool:
        return (
            compute_privacy_spent([DpEvent(noise_multiplier, sampling_rate, steps)], delta, accountant).epsilon
            <= epsilon
        )

    min_noise, max_noise = NOISE_MULTIPLIER_RANGE
    high = 1.0
    while not is_within_budget(high):
        if high >= max_noise:
            raise BudgetError(
                f"epsilon {epsilon:g} at delta {delta:g} is out of reach: {steps} steps at sampling rate {sampling_rate:g} "
                f"spend more even with noise multiplier {high:g}; take fewer steps, a smaller rate or a larger budget"
            )
        high = min(max_noise, high * 2)
    low = high / 2
    while low > min_noise and is_within_budget(low):
        low, high = low / 2, low
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_within_budget(middle) else (middle, high)
    return high


def epsilon_curve(
    event: DpEvent, num_rounds: int, delta: float, accountant: AccountantName = "tightest"
) -> list[float]:
    """Epsilon after each of `num_rounds` repetitions of `event`."""
    epsilons = (
        compute_privacy_spent(
            [DpEvent(event.noise_multiplier, event.sampling_rate, event.steps * num_done)], delta, accountant
        ).epsilon
        for num_done in range(1, num_rounds + 1)
    )
    return list(accumulate(epsilons, max))


@lru_cache(maxsize=2**16)
def _compute_cached(events: tuple[DpEvent, ...], delta: float, accountant: AccountantName) -> PrivacySpent:
    rdp = PrivacySpent(_rdp_epsilon(events, delta), delta, "rdp")
    if accountant == "rdp" or not events or rdp.epsilon > MAX_EPSILON:
        return rdp
    if accountant == "prv":
        epsilon = _prv_epsilon(events, delta, rdp.epsilon)
        return rdp if epsilon is None else PrivacySpent(epsilon, delta, "prv")
    epsilon = _pld_epsilon(events, delta, rdp.epsilon)
    if epsilon is None or (accountant == "tightest" and epsilon > rdp.epsilon):
        return rdp
    return PrivacySpent(epsilon, delta, "pld")


def _rdp_epsilon(events: tuple[DpEvent, ...], delta: float) -> float:
    if not events:
        return 0.0
    return max(
        0.0,
        float(
            (
                renyi_divergences(events) + (log_conversion_factors(RDP_ORDERS) - math.log(delta)) / (RDP_ORDERS - 1)
            ).min()
        ),
    )


@lru_cache(maxsize=2**12)
def _step_divergences(noise_multiplier: float, sampling_rate: float) -> FloatArray:
    if noise_multiplier == 0:
        return np.full_like(RDP_ORDERS, math.inf)
    divergences = [_divergence_at_order(noise_multiplier, sampling_rate, float(order)) for order in RDP_ORDERS]
    padded: FloatArray = np.maximum(divergences, 0) + RDP_SERIES_ERROR / (RDP_ORDERS - 1)
    padded.setflags(write=False)
    return padded


def _divergence_at_order(noise_multiplier: float, sampling_rate: float, order: float) -> float:
    """Infinite where the series does not converge; that order then gives no bound."""
    try:
        divergence = float(compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=order))
    except (ValueError, OverflowError):
        return math.inf
    return math.inf if math.isnan(divergence) else divergence


def _pld_epsilon(events: tuple[DpEvent, ...], delta: float, rdp_epsilon: float) -> float | None:
    if delta < 100 * FFT_ROUNDING_ERROR:
        return None
    cell_width = max(
        min(_wanted_cell_width(event) for event in events),
        max(_loss_width(event) for event in events) * 2 / MAX_PLD_CELLS,
    )
    cell_width = 2.0 ** math.floor(math.log2(cell_width))
    if (rdp_epsilon + max(_loss_width(event) for event in events)) / cell_width > 16 * MAX_PLD_CELLS:
        return None
    composed, *rest = (_step_pld(e.noise_multiplier, e.sampling_rate, cell_width).self_compose(e.steps) for e in events)
    for distribution in rest:
        composed = composed.compose(distribution)
    return max(0.0, float(composed.get_epsilon_for_delta(delta - FFT_ROUNDING_ERROR)))


def _wanted_cell_width(event: DpEvent) -> float:
    """About a fraction of the standard deviation of one step's privacy loss."""
    loss_std = event.sampling_rate * math.sqrt(math.expm1(min(event.noise_multiplier**-2, 100.0)))
    return min(1 / event.noise_multiplier, loss_std) / PLD_CELLS_PER_STD


def _loss_width(event: DpEvent) -> float:
    """The width of one step's privacy losses except e^-50 of their mass: 10 standard deviations of the noise."""
    loss = (20 * event.noise_multiplier + 1) / (2 * event.noise_multiplier**2)
    return max(0.0, loss + math.log(event.sampling_rate)) + min(loss, 1.0)


@lru_cache(maxsize=64)
def _step_pld(noise_multiplier: float, sampling_rate: float, cell_width: float) -> Any:
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_rate, value_discretization_interval=cell_width
    )


def _prv_epsilon(events: tuple[DpEvent, ...], delta: float, rdp_epsilon: float) -> float | None:
    """With an error of 0.5 %, or as small as a million points allow."""
    accountant = PRVAccountant()
    accountant.history = [(event.noise_multiplier, event.sampling_rate, event.steps) for event in events]
    num_points = 2 * (rdp_epsilon + 6) * math.sqrt(sum(event.steps for event in events) * math.log(12e3 / delta) / 2)
    eps_error = max(0.005 * rdp_epsilon, num_points / 2**20)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            epsilon = float(accountant.get_epsilon(delta, eps_error=eps_error))
    except (RuntimeError, ValueError, OverflowError):  # Opacus's checks of the discretisation failed
        return None
    return max(0.0, epsilon) if math.isfinite(epsilon) else None
