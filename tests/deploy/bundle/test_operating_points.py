"""Operating points on few scores with known counts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bundle.calibration import ModelCalibration, rescale_temperature
from deploy.bundle.operating_points import bin_scores, build_operating_points, compute_log_odds
from pipeline.core.errors import StudyError
from pipeline.protocol.tasks import PROFILE_SCORE_BINS


def count_scores(own: list[float], others: list[float]) -> np.ndarray:
    odds = np.array([*own, *others])
    return bin_scores(odds, np.array([True] * len(own) + [False] * len(others)), PROFILE_SCORE_BINS)


def test_score_bins_equal_those_of_the_sites():
    """The sites' binning in torch puts the same logits into the same bins."""
    import torch

    from sites.training.evaluation import score_bins

    logits = torch.randn(500, 2, generator=torch.Generator().manual_seed(1)) * 4
    p = logits.softmax(1).numpy()
    ours = bin_scores(compute_log_odds(p, 1), np.ones(500, bool), PROFILE_SCORE_BINS)[1]
    theirs = np.bincount(score_bins(logits, PROFILE_SCORE_BINS)[:, 1].numpy(), minlength=PROFILE_SCORE_BINS)
    assert np.abs(np.cumsum(ours) - np.cumsum(theirs)).max() <= 1  # one may be on an edge


def test_safe_operating_point_has_its_specificity_at_a_negative_score():
    others = [*np.linspace(-5, 0, 997), 1.0, 1.5, 2.0]  # 0.998 of 1,000 leaves two
    points, _ = build_operating_points(count_scores([-3.0, 1.4, 1.7, 3.0, 4.0], others))
    safe = points[0]
    assert safe.name == "safe"
    assert (safe.fp, safe.tn) == (2, 998)
    assert safe.specificity == 0.998
    assert (safe.tp, safe.fn) == (3, 2)  # 1.4 is above the third healthy score, but not above the second
    assert 1.45 < safe.log_odds <= 1.5


def test_safe_operating_point_with_few_negatives_has_no_false_positive():
    points, curve = build_operating_points(count_scores([1.0, 3.0], list(np.linspace(-4, 0.5, 100))))
    assert (points[0].fp, points[0].tp) == (0, 2)
    assert curve[0].fp == 0


def test_no_operating_points_without_positives_or_negatives():
    assert build_operating_points(count_scores([], [1.0, 2.0])) == ((), ())
    assert build_operating_points(count_scores([1.0], [])) == ((), ())


@given(st.lists(st.floats(-6, 6), min_size=1, max_size=60), st.lists(st.floats(-6, 6), min_size=1, max_size=200))
def test_operating_point_curve_goes_from_strict_to_lenient(own, others):
    _, curve = build_operating_points(count_scores(own, others))
    thresholds = [p.log_odds for p in curve]
    assert thresholds == sorted(thresholds, reverse=True)
    for p in curve:
        assert p.tp + p.fn == len(own)
        assert p.tn + p.fp == len(others)
    assert all(a.tp <= b.tp and a.fp <= b.fp for a, b in itertools.pairwise(curve))


def test_operating_point_curve_is_thinned():
    rng = np.random.default_rng(0)
    _, curve = build_operating_points(count_scores(list(rng.normal(2, 1, 300)), list(rng.normal(-2, 1, 3000))))
    assert 20 < len(curve) <= 48


def test_operating_point_at_a_probability_is_the_next_above():
    points, curve = build_operating_points(count_scores([0.0, 2.0, 3.0], list(np.linspace(-4, 1, 50))))
    own = ModelCalibration(
        temperature=1, positive_class="x", operating_points=points, curve=curve, measured_on="a test"
    )
    at = own.point_at_probability(0.5)
    assert at.log_odds >= 0
    assert not [p for p in curve if 0 <= p.log_odds < at.log_odds]
    with pytest.raises(StudyError, match="no operating point was measured"):
        own.point_at_probability(1 - 1e-15)


@given(st.floats(0.2, 5))
def test_rescale_temperature_is_softmax_of_scaled_logits(ratio):
    logits = np.array([[1.0, -2.0, 0.5], [3.0, 3.0, -1.0]])
    soft = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    hot = np.exp(logits * ratio) / np.exp(logits * ratio).sum(1, keepdims=True)
    assert np.allclose(rescale_temperature(soft.astype(np.float32), ratio), hot, atol=1e-5)


def test_log_odds_do_not_cancel_near_one():
    p = np.array([[1.0, 1e-12]], np.float32)
    assert compute_log_odds(p, 0)[0] == pytest.approx(math.log(1e12), rel=1e-3)
