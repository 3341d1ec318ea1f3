"""The value that selects the best round."""

from pipeline.coordinator.evaluation import metric_value
from pipeline.records.scores import EvaluationScores, ModelMetrics


def test_sites_select_the_best_round_if_they_evaluated():
    coordinator, pooled = ModelMetrics(n=5, accuracy=0.75, loss=0.5), ModelMetrics(n=7, accuracy=0.625, loss=0.25)
    both = {"val": EvaluationScores(coordinator=coordinator, pooled=pooled)}
    assert metric_value(both, "accuracy") == 0.625
    assert metric_value(both, "loss") == -0.25  # higher is better
    assert metric_value({"val": EvaluationScores(coordinator=coordinator)}, "accuracy") == 0.75
    assert metric_value(both, "auroc") is None
    assert metric_value(both, "accuracy", "test") is None
