"""Membership inference against scikit-learn and scipy, on an overfitted and on an untrained model."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve
from torch.nn import functional as F

from models.networks.mlp import MLP
from pipeline.core.errors import DataError
from privacy.attacks.membership import (
    average_by_unit,
    clopper_pearson,
    compute_losses,
    epsilon_lower_bound,
    evaluate_membership,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
loss_lists = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(loss_lists, loss_lists)
def test_auc_equals_scikit_learn_with_ties(members, others):
    found = evaluate_membership(torch.tensor(members), torch.tensor(others))
    truth = [1] * len(members) + [0] * len(others)
    assert found.auc == pytest.approx(roc_auc_score(truth, [-v for v in members + others]))


@settings(max_examples=60, deadline=None)
@given(loss_lists, loss_lists)
def test_tpr_at_fpr_is_on_the_roc_curve(members, others):
    found = evaluate_membership(torch.tensor(members), torch.tensor(others), false_positive_rates=(0.5, 0.2, 0.05))
    fpr, tpr, _ = roc_curve(
        [1] * len(members) + [0] * len(others), [-v for v in members + others], drop_intermediate=False
    )
    assert set(found.tpr_at_fpr) == {rate for rate in (0.5, 0.2, 0.05) if rate * len(others) >= 1}
    for rate, hits in found.tpr_at_fpr.items():
        assert hits == pytest.approx(tpr[fpr <= rate + 1e-9].max())


def test_membership_result_by_hand():
    found = evaluate_membership(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.5, 3.0]), "patient")
    assert found.auc == pytest.approx(5 / 6)  # of six pairs only (2, 1.5) is in the wrong order
    assert found.advantage == pytest.approx(2 / 3)  # threshold 1: two of three members, none of the others
    assert (found.num_members, found.num_nonmembers, found.unit) == (3, 2, "patient")
    assert (found.auc_low, found.auc_high) == (0, 1)  # too few units
    assert average_by_unit(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([7, 3, 7])).tolist() == [2.0, 3.5]


def test_auc_interval_covers_95_percent_with_clustered_cells():
    """Forty patients with fifteen similar cells each: an interval over cells would cover the truth in less than half."""
    truth = stats.norm.cdf(0.8 / np.sqrt(2))
    num_covered = num_covered_by_cells = 0
    units = torch.arange(40).repeat_interleave(15)
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(40, generator=g).repeat_interleave(15) + shift for shift in (-0.8, 0.0))
        a, b = (v + 1e-3 * torch.randn(600, generator=g) for v in (a, b))
        found = evaluate_membership(a, b, units=(units, units))
        num_covered += found.auc_low <= truth <= found.auc_high
        found = evaluate_membership(a, b)
        num_covered_by_cells += found.auc_low <= truth <= found.auc_high
    assert 182 <= num_covered <= 198
    assert num_covered_by_cells < 100


def test_auc_interval_without_units_is_delongs():
    """By the definition: variances of the placements, on the log-odds."""
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(60, generator=g) - 0.5, torch.randn(50, generator=g)
    wins = (a[:, None] < b).double()
    auc, se = float(wins.mean()), float((wins.mean(1).var() / 60 + wins.mean(0).var() / 50).sqrt())
    half_width = 1.96 * se / (auc * (1 - auc))
    found = evaluate_membership(a, b)
    expected = stats.logistic.cdf(np.log(auc / (1 - auc)) + np.array([-half_width, half_width]))
    assert [found.auc_low, found.auc_high] == pytest.approx(expected, abs=1e-4)


def test_auc_interval_of_a_perfect_order():
    found = evaluate_membership(torch.arange(20.0), 100 + torch.arange(30.0))
    assert (found.auc, found.auc_high) == (1, 1)
    assert found.auc_low == pytest.approx(0.025 ** (1 / 20))  # 20 separate pairs, all in order


@pytest.fixture(scope="module")
def overfitted(one_torch_thread):
    """(untrained network, network that memorized the random labels of the first forty images, images, labels)"""
    g = torch.Generator().manual_seed(3)
    x, y = torch.rand(120, 1, 8, 8, generator=g), torch.randint(0, 3, (120,), generator=g)
    untrained, module = (MLP(hidden=(64,)).init_network((1, 8, 8), 3, 0) for _ in range(2))
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(module(x[:40]), y[:40]).backward()
        optimizer.step()
    return untrained, module, x, y


def test_membership_of_an_overfitted_model(overfitted):
    _, module, x, y = overfitted
    all_losses = compute_losses(module, x, y)
    found = evaluate_membership(all_losses[:40], all_losses[40:])
    assert found.auc > 0.9
    assert found.auc_low > 0.7
    assert found.advantage > 0.8
    units = torch.arange(120) // 4
    patients = evaluate_membership(
        average_by_unit(all_losses[:40], units[:40]), average_by_unit(all_losses[40:], units[40:]), "patient"
    )
    assert patients.auc > found.auc
    assert (patients.num_members, patients.num_nonmembers) == (10, 20)
    assert epsilon_lower_bound(all_losses[:40], all_losses[40:], 1e-5) > 0.5


def test_membership_of_an_untrained_model(overfitted):
    untrained, _, x, y = overfitted
    all_losses = compute_losses(untrained, x, y)
    found = evaluate_membership(all_losses[:40], all_losses[40:])
    assert found.auc_low < 0.5 < found.auc_high
    assert epsilon_lower_bound(all_losses[:40], all_losses[40:], 1e-5) < 0.3


def test_reference_model_removes_example_difficulty():
    g = torch.Generator().manual_seed(0)
    hard = 3 * torch.randn(200, generator=g)
    reference = hard + 0.3 * torch.randn(200, generator=g)
    after = hard + 0.3 * torch.randn(200, generator=g)
    after[:100] -= 0.5
    raw = evaluate_membership(after[:100], after[100:])
    calibrated = evaluate_membership((after - reference)[:100], (after - reference)[100:])
    assert raw.auc < 0.7 < 0.8 < calibrated.auc


def test_losses_in_batches(overfitted, monkeypatch):
    _, module, x, y = overfitted
    expected = F.cross_entropy(module(x), y, reduction="none").detach()
    monkeypatch.setattr("privacy.attacks.membership.BATCH_SIZE", 7)
    assert torch.allclose(compute_losses(module, x, y).float(), expected, atol=1e-6)
    assert len(compute_losses(module, x[:0], y[:0])) == 0


def test_clopper_pearson_equals_scipy():
    for hits, n in ((0, 9), (3, 9), (9, 9), (70, 100)):
        low, high = clopper_pearson(hits, n, 0.975)
        exact = stats.binomtest(hits, n).proportion_ci(0.95, "exact")
        assert (low, high) == pytest.approx((exact.low, exact.high))


def test_epsilon_lower_bound_of_randomized_response():
    """Randomized response: a member's score is low with chance q, another's with 1 - q, which is log(q / (1 - q))-DP."""
    epsilon = 1.5
    q = 1 / (1 + np.exp(-epsilon))
    rng = np.random.default_rng(0)
    bounds = []
    for _ in range(200):
        a = torch.from_numpy((rng.random(300) >= q).astype(float))
        b = torch.from_numpy((rng.random(300) < q).astype(float))
        bounds.append(epsilon_lower_bound(a, b, 0.0))
    assert np.mean(np.array(bounds) <= epsilon) >= 0.95
    assert np.mean(bounds) > 0.8


def test_delta_lowers_the_bound():
    a, b = torch.zeros(100), torch.ones(100)
    without_delta, with_delta = epsilon_lower_bound(a, b, 0.0), epsilon_lower_bound(a, b, 0.5)
    high = 1 - 0.025 ** (1 / 50)  # bound of the false positive rate: none among the fifty test rows
    assert without_delta == pytest.approx(np.log((1 - high) / high), rel=1e-6)
    assert with_delta == pytest.approx(np.log((0.5 - high) / high), rel=1e-6)


@pytest.mark.parametrize("bad", [torch.zeros(0), torch.tensor([1.0, float("nan")])])
def test_invalid_losses_are_refused(bad):
    with pytest.raises(DataError, match="nonmembers"):
        evaluate_membership(torch.ones(5), bad)
