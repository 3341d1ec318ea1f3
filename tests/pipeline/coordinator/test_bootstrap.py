"""Bootstrap intervals: resamples agree with scikit-learn's weighted metrics, units are resampled, coverage is about 95 %."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from pipeline.coordinator.bootstrap import (
    MIN_UNITS,
    ScoredExamples,
    _bootstrap_accuracy,
    _bootstrap_curves,
    _resample_unit_counts,
    bootstrap_metrics,
    confidence_intervals,
)
from pipeline.coordinator.metrics import PositiveClass, compute_metrics
from sites.training.evaluation import score_bins, score_logits


def make_scores(n=600, units=40, seed=0, grain=1):
    rng = np.random.default_rng(seed)
    y = (rng.random(n) < 0.2).astype(np.int64)
    score = np.round(10**grain * (rng.normal(size=n) + 1.5 * y)).astype(np.int64)  # with ties
    return np.stack([-score, score], 1), y, rng.integers(0, units, n)


def make_examples(scores, y, unit):
    return ScoredExamples(scores, scores.argmax(1), y, unit)


def test_resampled_metrics_equal_weighted_metrics_of_scikit_learn():
    scores, y, unit = make_scores()
    unit_counts = _resample_unit_counts(40, 5, seed=1)
    auroc, auprc, sensitivity = _bootstrap_curves(scores[:, 1], y == 1, unit, unit_counts, 0.9)
    accuracies = _bootstrap_accuracy(scores.argmax(1), y, unit, unit_counts, 2)
    for resample, counts in enumerate(unit_counts):
        weight = counts[unit]
        assert auroc[resample] == pytest.approx(sk.roc_auc_score(y, scores[:, 1], sample_weight=weight))
        assert auprc[resample] == pytest.approx(sk.average_precision_score(y, scores[:, 1], sample_weight=weight))
        fpr, tpr, _ = sk.roc_curve(y, scores[:, 1], sample_weight=weight, drop_intermediate=False)
        assert sensitivity[resample] == pytest.approx(tpr[fpr <= 0.1 + 1e-9].max())
        predicted = scores.argmax(1)
        assert accuracies["accuracy"][resample] == pytest.approx(sk.accuracy_score(y, predicted, sample_weight=weight))
        balanced = sk.balanced_accuracy_score(y, predicted, sample_weight=weight)
        assert accuracies["balanced_accuracy"][resample] == pytest.approx(balanced)


def test_a_resample_has_as_many_units_as_the_sample():
    unit_counts = _resample_unit_counts(17, 200, seed=0)
    assert (unit_counts.sum(1) == 17).all()
    assert unit_counts.mean() == pytest.approx(1)
    assert (unit_counts == 0).any()


def test_bootstrap_over_patients_is_wider_than_over_their_cells():
    """The same cells, each repeated twenty times: a bootstrap over cells would take them for twenty times the evidence."""
    scores, y, _ = make_scores(n=60)
    patients = np.arange(60)
    over_patients = confidence_intervals(
        make_examples(np.repeat(scores, 20, 0), np.repeat(y, 20), np.repeat(patients, 20)), PositiveClass(1)
    )
    over_cells = confidence_intervals(
        make_examples(np.repeat(scores, 20, 0), np.repeat(y, 20), np.arange(1200)), PositiveClass(1)
    )
    unrepeated = confidence_intervals(make_examples(scores, y, patients), PositiveClass(1))
    width = lambda intervals: intervals["positive_auroc"][1] - intervals["positive_auroc"][0]  # noqa: E731
    assert width(over_patients) == pytest.approx(width(unrepeated), rel=1e-6)
    assert width(over_cells) < 0.4 * width(over_patients)


def test_coverage_is_about_95_percent_also_for_clustered_cells():
    """Thirty patients whose cells are all classified correctly or all wrongly: a bootstrap over cells covers a third."""
    covered, covered_by_cells = 0, 0
    for seed in range(200):
        is_correct = np.repeat(np.random.default_rng(seed).random(30) < 0.6, 20)
        scores = np.where(is_correct[:, None], [[0.0, -9.0]], [[-9.0, 0.0]])
        y = np.zeros(600, np.int64)
        low, high = confidence_intervals(make_examples(scores, y, np.repeat(np.arange(30), 20)), PositiveClass(), seed)[
            "accuracy"
        ]
        covered += low <= 0.6 <= high
        low, high = confidence_intervals(make_examples(scores, y, np.arange(600)), PositiveClass(), seed)["accuracy"]
        covered_by_cells += low <= 0.6 <= high
    assert 178 <= covered <= 198
    assert covered_by_cells < 120


def test_few_units_get_no_interval():
    scores, y, unit = make_scores(units=MIN_UNITS - 1)
    assert confidence_intervals(make_examples(scores, y, unit), PositiveClass(1)) == {}
    scores, y, unit = make_scores()  # many units, few of them with the class
    rare = np.where(unit < MIN_UNITS // 2 - 1, y, 0)
    assert set(confidence_intervals(make_examples(scores, rare, unit), PositiveClass(1))) == {
        "accuracy",
        "balanced_accuracy",
    }


def test_two_models_get_the_same_resamples():
    scores, y, unit = make_scores()
    worse = scores + np.random.default_rng(1).normal(0, 10, (len(y), 1)).astype(np.int64) * [[-1, 1]]
    better, lower = (
        bootstrap_metrics(make_examples(s, y, unit), PositiveClass(1), seed=4)["positive_auroc"]
        for s in (scores, worse)
    )
    assert np.std(better - lower) < 0.8 * np.hypot(np.std(better), np.std(lower))


def test_undefined_metrics_have_no_interval():
    scores, y, unit = make_scores()
    assert confidence_intervals(make_examples(scores, y, np.zeros_like(unit)), PositiveClass(1)) == {}
    one_class = confidence_intervals(make_examples(scores, np.zeros_like(y), unit), PositiveClass(1))
    assert "positive_auroc" not in one_class
    assert "accuracy" in one_class
    assert set(confidence_intervals(make_examples(scores, y, unit), PositiveClass())) == {
        "accuracy",
        "balanced_accuracy",
        "auroc",
    }


@pytest.mark.parametrize("margin_scale", [0.01, 1.0, 60.0])
def test_a_metric_is_within_its_interval(margin_scale):
    """Also of an untrained and of an overconfident model: metric and interval use the same bins."""
    g = torch.Generator().manual_seed(2)
    y = (torch.rand(400, generator=g) < 0.15).long()
    margin = margin_scale * (torch.randn(400, generator=g) + y)
    logits = torch.stack([-margin / 2, margin / 2], 1)
    examples = ScoredExamples(score_bins(logits).numpy(), logits.argmax(1).numpy(), y.numpy(), np.arange(400) // 10)
    point = compute_metrics(score_logits(logits, y), PositiveClass(1))
    for metric, (low, high) in confidence_intervals(examples, PositiveClass(1)).items():
        assert low - 0.02 <= point.value(metric) <= high + 0.02, metric
