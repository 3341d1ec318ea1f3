"""Bounds of belief, error rates and groups against their definitions, and how numbers are formatted."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from pipeline.reports.document.blocks import format_chance, format_epsilon, format_factor, format_share
from privacy.accounting.accountant import DpEvent, compute_epsilon
from privacy.audit.interpretation import (
    auc_bound,
    group_privacy,
    max_group_size,
    odds_ratio,
    posterior_bound,
    tpr_bound,
)
from privacy.audit.recompute_epsilon import are_epsilons_equal, dp_accounting_epsilon

epsilons = st.floats(0.01, 12)
deltas = st.floats(1e-9, 1e-2)


def test_posterior_bound_follows_the_odds():
    assert posterior_bound(0.01, 8.0) == pytest.approx((0.01 / 0.99) * math.e**8 / (1 + (0.01 / 0.99) * math.e**8))
    assert format_share(posterior_bound(0.01, 8.0)) == "96.8 %"
    assert posterior_bound(0.5, math.log(3)) == pytest.approx(0.75)
    assert posterior_bound(0.2, 0.0) == pytest.approx(0.2)
    assert round(odds_ratio(8.0)) == 2981
    assert odds_ratio(5000.0) == math.inf


@given(epsilons, deltas)
def test_tpr_bound_is_reached_by_randomized_response(e, d):
    """The best test under (e, 0) is right with probability e^e / (1 + e^e)."""
    truth = odds_ratio(e) / (1 + odds_ratio(e))
    assert tpr_bound(e, 0.0, 1 - truth) == pytest.approx(truth)
    assert tpr_bound(e, d, 1 - truth) >= truth


@given(epsilons, deltas)
def test_auc_bound_is_the_area_under_the_tpr_bound(e, d):
    knee = (1 - d) / (1 + odds_ratio(e))
    fpr = np.unique(np.concatenate([np.linspace(0, 1, 501), [knee, 1 - d]]))  # linear in between
    tpr = np.array([tpr_bound(e, d, float(rate)) for rate in fpr])
    assert auc_bound(e, d) == pytest.approx(np.trapezoid(tpr, fpr), abs=1e-9)


def test_group_privacy_by_hand():
    e, d = 0.5, 1e-6
    assert group_privacy(e, d, 1) == (e, pytest.approx(d))
    by_hand = d * (1 + math.exp(e) + math.exp(2 * e))  # one unit after the other
    assert group_privacy(e, d, 3) == (1.5, pytest.approx(by_hand))
    assert group_privacy(8.0, 1e-5, 24) == (192.0, 1.0)
    assert group_privacy(0.0, 1e-3, 5) == (0.0, pytest.approx(5e-3))
    size = max_group_size(e, d)
    assert group_privacy(e, d, size)[1] < 1 <= group_privacy(e, d, size + 1)[1]


def test_formats_of_shares_chances_factors_and_epsilons():
    assert [format_share(v) for v in (0.01, 0.5, 0.99967, 1 - 2e-7, 1.0)] == [
        "1 %",
        "50.0 %",
        "99.97 %",
        "99.99998 %",
        "100.0 %",
    ]
    assert [format_chance(v) for v in (1e-5, 2e-6, 0.5)] == ["one in 100,000", "one in 500,000", "0.5"]
    assert [format_factor(v) for v in (2.718, 2981.0, 1e9, math.inf)] == [
        "2.72",
        "2,981",
        "over a million",
        "over a million",
    ]
    assert [format_epsilon(v) for v in (None, 0.0012, 7.9987)] == ["–", "0.001", "8.00"]


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.1, 0.01, 500), (1.0, 0.3, 12), (3.0, 1.0, 4)])
def test_dp_accounting_epsilon_equals_opacus(noise, rate, steps):
    """Integer orders alone, which converge everywhere, give a slightly looser bound than all orders."""
    accountant = RdpAccountant([float(order) for order in range(2, 64)], NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    epsilon = dp_accounting_epsilon([DpEvent(noise, rate, steps)], 1e-5)
    assert epsilon <= accountant.get_epsilon(1e-5) <= 1.1 * epsilon
    assert are_epsilons_equal(epsilon, compute_epsilon([DpEvent(noise, rate, steps)], 1e-5, "rdp"), 1e-2)


def test_epsilons_are_compared_with_a_relative_tolerance():
    assert are_epsilons_equal(100.0, 100.05, 1e-3)
    assert not are_epsilons_equal(100.0, 100.2, 1e-3)
    assert are_epsilons_equal(0.0, 0.0, 1e-3)
    assert are_epsilons_equal(math.inf, math.inf, 1e-3)
    assert dp_accounting_epsilon([DpEvent(0.0, 0.5, 3)], 1e-5) == math.inf
