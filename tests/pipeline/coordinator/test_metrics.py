"""Metrics computed from evaluation sums against scikit-learn on the examples themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from pipeline.coordinator.metrics import PositiveClass, RocPrCurve, compute_metrics, compute_plot_data
from pipeline.protocol.tasks import EvaluationSums
from sites.training.evaluation import empty_sums, score_logits


def make_logits(n=4000, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    logits = torch.randn(n, classes, generator=g)
    logits[torch.arange(n), y] += 1.0
    return logits, y


def test_metrics_equal_those_of_scikit_learn():
    logits, y = make_logits()
    p, predicted = logits.double().softmax(1).numpy(), logits.argmax(1).numpy()
    metrics = compute_metrics(score_logits(logits, y), PositiveClass(class_index=1, target_specificity=0.9))
    assert metrics.n == 4000
    assert metrics.loss == pytest.approx(sk.log_loss(y, p))
    assert metrics.accuracy == pytest.approx(sk.accuracy_score(y, predicted))
    assert metrics.balanced_accuracy == pytest.approx(sk.balanced_accuracy_score(y, predicted))
    assert metrics.macro_f1 == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    assert metrics.auroc == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"), abs=2e-4)
    assert metrics.positive_auroc == pytest.approx(sk.roc_auc_score(y == 1, p[:, 1]), abs=2e-4)
    assert metrics.positive_auprc == pytest.approx(sk.average_precision_score(y == 1, p[:, 1]), abs=2e-3)
    fpr, tpr, _ = sk.roc_curve(y == 1, p[:, 1])
    exact = tpr[fpr <= 0.1].max()
    # thresholds are bin edges only, so the sensitivity is never overestimated
    assert exact - 0.02 < metrics.sensitivity_at_specificity <= exact


def test_calibration_error_by_hand():
    # ten predictions with confidence 0.8 (bin 12 of 15), six of them correct: |8 - 6| / 10
    logits = torch.tensor([[np.log(4.0), 0.0]]).repeat(10, 1)
    y = torch.tensor([0] * 6 + [1] * 4)
    assert compute_metrics(score_logits(logits, y)).calibration_error == pytest.approx(0.2, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 399), st.integers(0, 1000))
def test_sum_over_sites_equals_the_pooled_sums(split, seed):
    logits, y = make_logits(400, 3, seed)
    pooled = score_logits(logits, y)
    summed = score_logits(logits[:split], y[:split]) + score_logits(logits[split:], y[split:])
    for name, value in pooled.to_dict().items():
        torch.testing.assert_close(summed.to_dict()[name], value)


def test_evaluation_sums_to_dict_round_trip():
    sums = score_logits(*make_logits(50))
    restored = EvaluationSums.from_dict(sums.to_dict())
    assert all(torch.equal(a, b) for a, b in zip(restored.to_dict().values(), sums.to_dict().values(), strict=True))


def test_undefined_metrics_are_none():
    assert compute_metrics(empty_sums(3), PositiveClass(1)).accuracy is None
    one_class = compute_metrics(score_logits(torch.randn(5, 2), torch.zeros(5, dtype=torch.long)), PositiveClass(1))
    assert one_class.auroc is None
    assert one_class.positive_auroc is None
    assert one_class.accuracy is not None


def test_auroc_ranks_saturated_probabilities_by_their_log_odds():
    """Probabilities that round to 1.0 still rank by their log-odds."""
    y = torch.tensor([0] * 50 + [1] * 50)
    logits = torch.stack([torch.zeros(100), torch.linspace(2, 11, 100)], 1)
    assert compute_metrics(score_logits(logits, y), PositiveClass(1)).positive_auroc == pytest.approx(1.0, abs=1e-3)


def test_plot_data():
    logits, y = make_logits(classes=2)
    plot_data = compute_plot_data(score_logits(logits, y), PositiveClass())
    assert plot_data["roc"].fpr[0] == 0
    assert plot_data["roc"].tpr[-1] == 1
    assert sum(n for _, _, n in plot_data["reliability"]) == 4000
    assert np.array(plot_data["confusion"]).sum() == 4000
    empty = RocPrCurve.from_histogram(np.zeros((2, 4)))
    assert not empty.is_defined


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 60), st.integers(0, 10_000))
def test_auprc_and_auroc_of_few_examples(n, seed):
    logits, y = make_logits(n, 2, seed)
    if 0 < int(y.sum()) < n:
        expected = sk.average_precision_score(y, (logits[:, 1] - logits[:, 0]).numpy())
        assert compute_metrics(score_logits(logits, y), PositiveClass(1)).positive_auprc == pytest.approx(
            expected, abs=0.03
        )
        assert compute_metrics(score_logits(logits, y), PositiveClass(1)).positive_auroc == pytest.approx(
            sk.roc_auc_score(y, (logits[:, 1] - logits[:, 0]).numpy()), abs=0.02
        )


@pytest.mark.parametrize("scale", [0.1, 1, 10, 100])
def test_scaling_the_logits_does_not_change_auroc(scale):
    logits, y = make_logits(2000, 2)
    expected = sk.roc_auc_score(y, (logits[:, 1] - logits[:, 0]).numpy())
    assert compute_metrics(score_logits(scale * logits, y), PositiveClass(1)).positive_auroc == pytest.approx(
        expected, abs=2e-3
    )


def test_loss_that_is_not_finite_is_none():
    assert compute_metrics(score_logits(torch.tensor([[float("inf"), 0.0]]), torch.tensor([1]))).loss is None
