import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from pipeline.reports.document.blocks import chance, eps, share, times
from privacy.accounting.accountant import Event, epsilon
from privacy.audit.interpretation import belief, detection, factor, largest_auc, largest_group, of_group
from privacy.audit.recompute_epsilon import agree, outside

epsilons = st.floats(0.01, 12)
deltas = st.floats(1e-9, 1e-2)


def test_beliefs_move_as_odds_do():
    assert belief(0.01, 8.0) == pytest.approx((0.01 / 0.99) * math.e**8 / (1 + (0.01 / 0.99) * math.e**8))
    assert share(belief(0.01, 8.0)) == "96.8 %"
    assert belief(0.5, math.log(3)) == pytest.approx(0.75)
    assert belief(0.2, 0.0) == pytest.approx(0.2)
    assert round(factor(8.0)) == 2981
    assert factor(5000.0) == math.inf


@given(epsilons, deltas)
def test_no_guess_beats_randomised_response(e, d):
    """The best there is under (e, 0): tell the truth with chance e^e / (1 + e^e)."""
    truth = factor(e) / (1 + factor(e))
    assert detection(e, 0.0, 1 - truth) == pytest.approx(truth)
    assert detection(e, d, 1 - truth) >= truth


@given(epsilons, deltas)
def test_the_area_is_the_curves(e, d):
    knee = (1 - d) / (1 + factor(e))
    alarms = np.unique(np.concatenate([np.linspace(0, 1, 501), [knee, 1 - d]]))  # straight in between
    curve = np.array([detection(e, d, float(alarm)) for alarm in alarms])
    assert largest_auc(e, d) == pytest.approx(np.trapezoid(curve, alarms), abs=1e-9)


def test_groups_pay_for_every_member():
    e, d = 0.5, 1e-6
    assert of_group(e, d, 1) == (e, pytest.approx(d))
    by_hand = d * (1 + math.exp(e) + math.exp(2 * e))  # one after the other
    assert of_group(e, d, 3) == (1.5, pytest.approx(by_hand))
    assert of_group(8.0, 1e-5, 24) == (192.0, 1.0)
    assert of_group(0.0, 1e-3, 5) == (0.0, pytest.approx(5e-3))
    most = largest_group(e, d)
    assert of_group(e, d, most)[1] < 1 <= of_group(e, d, most + 1)[1]


def test_numbers_as_people_read_them():
    assert [share(v) for v in (0.01, 0.5, 0.99967, 1 - 2e-7, 1.0)] == [
        "1 %",
        "50.0 %",
        "99.97 %",
        "99.99998 %",
        "100.0 %",
    ]
    assert [chance(v) for v in (1e-5, 2e-6, 0.5)] == ["one in 100,000", "one in 500,000", "0.5"]
    assert [times(v) for v in (2.718, 2981.0, 1e9, math.inf)] == ["2.72", "2,981", "over a million", "over a million"]
    assert [eps(v) for v in (None, 0.0012, 7.9987)] == ["–", "0.001", "8.00"]


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.1, 0.01, 500), (1.0, 0.3, 12), (3.0, 1.0, 4)])
def test_the_accountant_by_others(noise, rate, steps):
    """With whole orders alone, which converge everywhere: a bound a little looser than over all orders."""
    whole = RdpAccountant([float(order) for order in range(2, 64)], NeighboringRelation.ADD_OR_REMOVE_ONE)
    whole.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    found = outside([Event(noise, rate, steps)], 1e-5)
    assert found <= whole.get_epsilon(1e-5) <= 1.1 * found
    assert agree(found, epsilon([Event(noise, rate, steps)], 1e-5, "rdp"), 1e-2)


def test_agreement_is_relative():
    assert agree(100.0, 100.05, 1e-3)
    assert not agree(100.0, 100.2, 1e-3)
    assert agree(0.0, 0.0, 1e-3)
    assert agree(math.inf, math.inf, 1e-3)
    assert outside([Event(0.0, 0.5, 3)], 1e-5) == math.inf
