"""Accountants against closed forms, each other, and dp_accounting."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import log_ndtr

from pipeline.core.errors import BudgetError
from privacy.accounting.accountant import (
    RDP_ORDERS,
    DpEvent,
    calibrate_noise_multiplier,
    compute_epsilon,
    compute_privacy_spent,
    epsilon_curve,
    log_conversion_factors,
    merge_events,
    renyi_divergences,
)

# noise, rate, steps, delta
SETTINGS = [
    (0.5, 0.001, 1000, 1e-5),
    (0.5, 0.05, 10, 1e-6),
    (0.7, 0.02, 300, 1e-5),
    (1.0, 0.001, 10_000, 1e-6),
    (1.0, 0.01, 1000, 1e-5),
    (1.0, 0.01, 10_000, 1e-6),
    (1.0, 1.0, 1, 1e-5),
    (1.5, 0.2, 50, 1e-5),
    (2.0, 0.05, 400, 1e-6),
    (2.0, 0.1, 1000, 1e-5),
    (3.0, 0.5, 100, 1e-5),
    (4.0, 0.02, 10_000, 1e-5),
    (4.0, 0.3, 1000, 1e-6),
    (4.0, 1.0, 10, 1e-6),
]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact epsilon of the Gaussian mechanism with sensitivity over noise `mu` (Balle and Wang 2018, theorem 8)."""

    def excess(eps: float) -> float:
        return math.exp(log_ndtr(mu / 2 - eps / mu)) - math.exp(eps + log_ndtr(-mu / 2 - eps / mu)) - delta

    return float(brentq(excess, 0, mu * mu / 2 + 12 * mu, xtol=1e-12)) if excess(0) > 0 else 0.0


def compose_with_dp_accounting(kind: type, noise: float, rate: float, steps: int, **options: object) -> object:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return kind(**options).compose(event, steps)


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), SETTINGS)
def test_prv_and_pld_agree_and_rdp_is_above(noise: float, rate: float, steps: int, delta: float) -> None:
    event = DpEvent(noise, rate, steps)
    prv, pld, rdp = (compute_privacy_spent([event], delta, accountant) for accountant in ("prv", "pld", "rdp"))
    assert (prv.accountant, pld.accountant, rdp.accountant) == ("prv", "pld", "rdp")
    assert prv.epsilon == pytest.approx(pld.epsilon, rel=0.02)
    assert rdp.epsilon > max(prv.epsilon, pld.epsilon)
    assert compute_privacy_spent([event], delta) == pld


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), SETTINGS[1::3])
def test_pld_epsilon_equals_dp_accounting_on_a_finer_grid(noise: float, rate: float, steps: int, delta: float) -> None:
    theirs = compose_with_dp_accounting(PLDAccountant, noise, rate, steps).get_epsilon(delta)
    assert theirs * (1 - 1e-5) < compute_epsilon([DpEvent(noise, rate, steps)], delta, "pld") < theirs * 1.002


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), SETTINGS)
def test_rdp_epsilon_equals_dp_accounting(noise: float, rate: float, steps: int, delta: float) -> None:
    is_integer = RDP_ORDERS.round() == RDP_ORDERS  # at other orders dp_accounting adds terms that should alternate
    theirs = compose_with_dp_accounting(RdpAccountant, noise, rate, steps, orders=RDP_ORDERS[is_integer].tolist())
    ours = renyi_divergences([DpEvent(noise, rate, steps)])
    np.testing.assert_allclose(ours[is_integer], theirs._rdp, rtol=1e-6, atol=1e-7)
    assert compute_epsilon([DpEvent(noise, rate, steps)], delta, "rdp") <= theirs.get_epsilon(delta) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("noise", "steps"), [(0.5, 1), (1.0, 1), (3.0, 7), (10.0, 100), (30.0, 5000), (100.0, 100_000)]
)
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
def test_gaussian_mechanism_in_closed_form(noise: float, steps: int, delta: float) -> None:
    exact = gaussian_epsilon(math.sqrt(steps) / noise, delta)
    assert exact <= compute_epsilon([DpEvent(noise, 1.0, steps)], delta) <= exact * 1.002
    assert compute_epsilon([DpEvent(noise, 1.0, steps)], delta, "rdp") >= exact
    once = compute_epsilon([DpEvent(noise / math.sqrt(steps), 1.0, 1)], delta)
    assert compute_epsilon([DpEvent(noise, 1.0, steps)], delta) == pytest.approx(once, rel=2e-3)


@pytest.mark.parametrize("accountant", ["rdp", "pld", "prv"])
def test_gaussians_of_different_noise_multipliers_compose(accountant: str) -> None:
    exact = gaussian_epsilon(math.sqrt(3 / 2**2 + 10 / 5**2 + 1 / 9), 1e-6)
    found = compute_epsilon([DpEvent(2.0, 1.0, 3), DpEvent(5.0, 1.0, 10), DpEvent(3.0, 1.0, 1)], 1e-6, accountant)
    assert exact <= found <= exact * (1.12 if accountant == "rdp" else 1.01)


def test_rdp_of_small_sampling_rates() -> None:
    """At small rates the divergence is rate^2 order (e^(1/noise^2) - 1) / 2 to first order, however small."""
    low = RDP_ORDERS[RDP_ORDERS <= 20]
    first = 1e5 * 1e-10 * low * math.expm1(1 / 16) / 2
    found = renyi_divergences([DpEvent(4.0, 1e-5, 100_000)])[: len(low)]
    assert (found >= first).all()
    assert (found <= first * 1.03 + 1e5 * 2e-12 / (low - 1)).all()


def test_rdp_conversion_factor_is_the_smallest() -> None:
    y = np.linspace(0.0, 30.0, 30_001)
    for order, slack in zip(RDP_ORDERS, log_conversion_factors(RDP_ORDERS), strict=True):
        assert (-np.expm1(-y) <= np.exp(np.minimum(slack + (order - 1) * y, 1.0)) * (1 + 1e-12)).all()
        touch = math.log(order / (order - 1))
        assert -math.expm1(-touch) == pytest.approx(math.exp(slack + (order - 1) * touch))


def test_equal_dp_events_merge() -> None:
    parts = [DpEvent(1.0, 0.1, 3), DpEvent(2, 0.1, 1), DpEvent(1.0, 0.1, 4), DpEvent(5.0, 0.1, 0)]
    assert merge_events(parts) == (DpEvent(1.0, 0.1, 7), DpEvent(2.0, 0.1, 1))
    assert compute_privacy_spent(parts, 1e-5) == compute_privacy_spent(reversed(parts), 1e-5)


@pytest.mark.parametrize("accountant", ["rdp", "pld", "prv", "tightest"])
def test_no_steps_spend_nothing_and_no_noise_spends_infinity(accountant: str) -> None:
    assert compute_epsilon([], 1e-5, accountant) == 0
    assert compute_epsilon([DpEvent(1.0, 0.1, 0)], 1e-5, accountant) == 0
    assert compute_epsilon([DpEvent(0.0, 0.1, 1)], 1e-5, accountant) == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "tightest"])
def test_extreme_parameters_raise_no_warnings(accountant: str) -> None:
    corners = itertools.product([0.3, 100.0], [1e-5, 0.03, 1.0], [1, 100_000], [1e-10, 1e-2])
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        for noise, rate, steps, delta in corners:
            assert 0 <= compute_epsilon([DpEvent(noise, rate, steps)], delta, accountant) < math.inf


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise multiplier -1.0"),
        ({"noise_multiplier": math.nan}, "noise multiplier nan"),
        ({"noise_multiplier": math.inf}, "noise multiplier inf"),
        ({"sampling_rate": 0.0}, "sampling rate 0.0"),
        ({"sampling_rate": 1.1}, "sampling rate 1.1"),
        ({"steps": -1}, "steps -1"),
        ({"steps": 1.5}, "steps 1.5"),
        ({"steps": True}, "steps True"),
    ],
)
def test_invalid_dp_events_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        DpEvent(**{"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 1} | wrong)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_invalid_deltas_are_refused(delta: float) -> None:
    with pytest.raises(BudgetError, match="delta"):
        compute_epsilon([DpEvent(1.0, 0.1, 1)], delta)


@settings(max_examples=150, deadline=None)
@given(
    noise=st.sampled_from([0.4, 1.0, 6.0, 60.0]),
    rate=st.sampled_from([1e-3, 0.04, 0.6, 1.0]),
    delta=st.sampled_from([1e-9, 1e-8, 1e-5]),
    accountant=st.sampled_from(["rdp", "rdp", "rdp", "tightest"]),
    steps=st.integers(1, 100_000),
    more=st.integers(0, 3),
)
def test_more_steps_never_spend_less(
    noise: float, rate: float, delta: float, accountant: str, steps: int, more: int
) -> None:
    less = compute_epsilon([DpEvent(noise, rate, steps)], delta, accountant)
    assert less <= compute_epsilon([DpEvent(noise, rate, steps + 10**more)], delta, accountant)


@pytest.mark.parametrize(("noise", "rate", "start"), [(100.0, 1.0, 99_000), (30.0, 1.0, 4090), (2.0, 0.01, 65_000)])
def test_pld_epsilon_increases_despite_rounding_errors(noise: float, rate: float, start: int) -> None:
    """At the smallest delta of `pld`, where Fourier transforms are least accurate, with one more step each time."""
    spent = [compute_privacy_spent([DpEvent(noise, rate, start + n)], 1e-8) for n in range(6)]
    assert all(s.accountant == "pld" for s in spent)
    assert all(a.epsilon < b.epsilon for a, b in itertools.pairwise(spent))


def test_tiny_deltas_use_rdp() -> None:
    """At this delta `pld` of 100,000 steps would be 0.08 % too small."""
    found = compute_privacy_spent([DpEvent(100.0, 1.0, 100_000)], 1e-10)
    assert found.accountant == "rdp"
    assert found.epsilon >= gaussian_epsilon(math.sqrt(1e5) / 100, 1e-10)


@pytest.mark.parametrize("accountant", ["rdp", "tightest"])
@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"),
    [
        (1.0, 1e-5, 0.05, 200),
        (8.0, 1e-5, 0.1, 1000),
        (0.3, 1e-6, 1.0, 1),
        (50.0, 1e-5, 1.0, 3),
        (4.0, 1e-9, 0.01, 3000),
    ],
)
def test_calibrated_noise_multiplier_is_the_smallest(
    target: float, delta: float, rate: float, steps: int, accountant: str
) -> None:
    noise = calibrate_noise_multiplier(target, delta, rate, steps, accountant)
    assert compute_epsilon([DpEvent(noise, rate, steps)], delta, accountant) <= target
    assert compute_epsilon([DpEvent(noise / 1.002, rate, steps)], delta, accountant) > target


def test_calibrated_noise_multiplier_of_one_gaussian_is_analytic() -> None:
    noise = calibrate_noise_multiplier(1.0, 1e-5, 1.0, 1)
    assert gaussian_epsilon(1 / noise, 1e-5) <= 1.0 <= gaussian_epsilon(1.002 / noise, 1e-5)
    assert noise == pytest.approx(3.73, rel=0.002)


def test_unreachable_epsilon_is_refused() -> None:
    with pytest.raises(
        BudgetError, match="out of reach: 100 steps at sampling rate 1 spend more even with noise multiplier 10000"
    ):
        calibrate_noise_multiplier(1e-5, 1e-9, 1.0, 100, "rdp")
    with pytest.raises(BudgetError, match="epsilon 0"):
        calibrate_noise_multiplier(0.0, 1e-5, 0.1, 10)
    with pytest.raises(BudgetError, match="0 steps need no noise"):
        calibrate_noise_multiplier(1.0, 1e-5, 0.1, 0)


def test_epsilon_curve_by_round() -> None:
    found = epsilon_curve(DpEvent(4.0, 1.0, 5), 8, 1e-5)
    assert found == sorted(found)
    for num_rounds, epsilon in enumerate(found, 1):
        assert epsilon == pytest.approx(gaussian_epsilon(math.sqrt(5 * num_rounds) / 4, 1e-5), rel=1e-3)
