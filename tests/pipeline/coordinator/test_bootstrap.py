"""Bootstrap intervals: draws agree with scikit-learn's weighted metrics, units are drawn whole, coverage is about right."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from pipeline.coordinator.bootstrap import (
    MIN_UNITS,
    ScoredExamples,
    _bootstrap_accuracy,
    _bootstrap_curves,
    _draw_unit_counts,
    bootstrap_metrics,
    confidence_intervals,
)
from pipeline.coordinator.metrics import PositiveClass, compute_metrics
from sites.training.evaluation import score_bins, score_logits


def sample(n=600, units=40, seed=0, grain=1):
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.2).astype(np.int64)
    score = np.round(10**grain * (rng.normal(size=n) + 1.5 * y)).astype(np.int64)  # with ties
    return np.stack([-score, score], 1), y, rng.integers(0, units, n)


def answers(scores, y, unit):
    return ScoredExamples(scores, scores.argmax(1), y, unit)


def test_every_draw_is_a_weighted_metric():
    scores, y, unit = sample()
    times = _draw_unit_counts(40, 5, seed=1)
    areas, precision, reached = _bootstrap_curves(scores[:, 1], y == 1, unit, times, 0.9)
    answers = _bootstrap_accuracy(scores.argmax(1), y, unit, times, 2)
    for draw, counts in enumerate(times):
        weight = counts[unit]
        assert areas[draw] == pytest.approx(sk.roc_auc_score(y, scores[:, 1], sample_weight=weight))
        assert precision[draw] == pytest.approx(sk.average_precision_score(y, scores[:, 1], sample_weight=weight))
        fpr, tpr, _ = sk.roc_curve(y, scores[:, 1], sample_weight=weight, drop_intermediate=False)
        assert reached[draw] == pytest.approx(tpr[fpr <= 0.1 + 1e-9].max())
        guess = scores.argmax(1)
        assert answers["accuracy"][draw] == pytest.approx(sk.accuracy_score(y, guess, sample_weight=weight))
        balanced = sk.balanced_accuracy_score(y, guess, sample_weight=weight)
        assert answers["balanced_accuracy"][draw] == pytest.approx(balanced)


def test_units_are_drawn_as_often_as_there_are_units():
    times = _draw_unit_counts(17, 200, seed=0)
    assert (times.sum(1) == 17).all()
    assert times.mean() == pytest.approx(1)
    assert (times == 0).any()


def test_cells_of_one_patient_say_less_than_cells_of_many():
    """The same cells, each repeated twenty times: a bootstrap over cells would call that twenty times as sure."""
    scores, y, _ = sample(n=60)
    apart = np.arange(60)
    honest = confidence_intervals(
        answers(np.repeat(scores, 20, 0), np.repeat(y, 20), np.repeat(apart, 20)), PositiveClass(1)
    )
    fooled = confidence_intervals(
        answers(np.repeat(scores, 20, 0), np.repeat(y, 20), np.arange(1200)), PositiveClass(1)
    )
    plain = confidence_intervals(answers(scores, y, apart), PositiveClass(1))
    width = lambda found: found["positive_auroc"][1] - found["positive_auroc"][0]  # noqa: E731
    assert width(honest) == pytest.approx(width(plain), rel=1e-6)
    assert width(fooled) < 0.4 * width(honest)


def test_about_95_of_100_intervals_hold_the_truth_also_for_clustered_cells():
    """Thirty patients, of each of whom all cells are right or all wrong: a bootstrap over cells would hold it in a third."""
    held, fooled = 0, 0
    for seed in range(200):
        right = np.repeat(np.random.default_rng(seed).random(30) < 0.6, 20)
        scores = np.where(right[:, None], [[0.0, -9.0]], [[-9.0, 0.0]])
        y = np.zeros(600, np.int64)
        low, high = confidence_intervals(answers(scores, y, np.repeat(np.arange(30), 20)), PositiveClass(), seed)[
            "accuracy"
        ]
        held += low <= 0.6 <= high
        low, high = confidence_intervals(answers(scores, y, np.arange(600)), PositiveClass(), seed)["accuracy"]
        fooled += low <= 0.6 <= high
    assert 178 <= held <= 198
    assert fooled < 120


def test_few_units_get_no_interval():
    scores, y, unit = sample(units=MIN_UNITS - 1)
    assert confidence_intervals(answers(scores, y, unit), PositiveClass(1)) == {}
    scores, y, unit = sample()  # many units, few of them with the class
    rare = np.where(unit < MIN_UNITS // 2 - 1, y, 0)
    assert set(confidence_intervals(answers(scores, rare, unit), PositiveClass(1))) == {"accuracy", "balanced_accuracy"}


def test_draws_of_two_models_are_the_same_units():
    scores, y, unit = sample()
    worse = scores + np.random.default_rng(1).normal(0, 10, (len(y), 1)).astype(np.int64) * [[-1, 1]]
    better, lesser = (
        bootstrap_metrics(answers(s, y, unit), PositiveClass(1), seed=4)["positive_auroc"] for s in (scores, worse)
    )
    assert np.std(better - lesser) < 0.8 * np.hypot(np.std(better), np.std(lesser))


def test_what_is_undefined_is_left_out():
    scores, y, unit = sample()
    assert confidence_intervals(answers(scores, y, np.zeros_like(unit)), PositiveClass(1)) == {}
    alone = confidence_intervals(answers(scores, np.zeros_like(y), unit), PositiveClass(1))
    assert "positive_auroc" not in alone
    assert "accuracy" in alone
    assert set(confidence_intervals(answers(scores, y, unit), PositiveClass())) == {
        "accuracy",
        "balanced_accuracy",
        "auroc",
    }


@pytest.mark.parametrize("crowded", [0.01, 1.0, 60.0])
def test_a_score_lies_in_its_own_interval(crowded):
    """Also where a model has hardly learnt, or is over-sure: both come from the same bins."""
    g = torch.Generator().manual_seed(2)
    y = (torch.rand(400, generator=g) < 0.15).long()
    margin = crowded * (torch.randn(400, generator=g) + y)
    logits = torch.stack([-margin / 2, margin / 2], 1)
    told = ScoredExamples(score_bins(logits).numpy(), logits.argmax(1).numpy(), y.numpy(), np.arange(400) // 10)
    point = compute_metrics(score_logits(logits, y), PositiveClass(1))
    for metric, (low, high) in confidence_intervals(told, PositiveClass(1)).items():
        assert low - 0.02 <= point[metric] <= high + 0.02, metric
