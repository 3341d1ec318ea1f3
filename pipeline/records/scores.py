"""Metrics of models: of one model on one set of examples, of all models on one split, and the headline among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Split
from pipeline.records.base import FiniteOrNone, FrozenRecord

EvaluatedAt = Literal["coordinator", "pooled"]  # on the coordinator's set, or on the sites' sets together
HEADLINE_SPLITS: tuple[Split, ...] = ("val", "test", "train")
POSITIVE_AUROC = "positive_auroc"


class RocPoints(FrozenRecord):
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]


class PrPoints(FrozenRecord):
    recall: tuple[float, ...]
    precision: tuple[float, ...]


class ModelMetrics(FrozenRecord):
    """None: undefined (no examples, one class only). Those of the positive class exist only where the study names one, the
    data for plots only in the final test."""

    n: int
    loss: FiniteOrNone = None
    accuracy: FiniteOrNone = None
    balanced_accuracy: FiniteOrNone = None
    macro_f1: FiniteOrNone = None
    auroc: FiniteOrNone = None
    auprc: FiniteOrNone = None
    calibration_error: FiniteOrNone = None
    positive_auroc: FiniteOrNone = None
    positive_auprc: FiniteOrNone = None
    sensitivity_at_specificity: FiniteOrNone = None
    confusion: tuple[tuple[int, ...], ...] | None = None  # rows are true classes
    class_auroc: tuple[FiniteOrNone, ...] | None = None
    roc: RocPoints | None = None
    pr: PrPoints | None = None
    reliability: tuple[tuple[float, float, int], ...] | None = None  # (confidence, accuracy, examples) of each bin

    def value(self, metric: str) -> float | None:
        value: float | None = getattr(self, metric)
        return value

    @property
    def headline_metric(self) -> str:
        """Of a study that names a positive class its AUROC is recorded, even where it is undefined."""
        return POSITIVE_AUROC if POSITIVE_AUROC in self.model_fields_set else "accuracy"


class EvaluationScores(FrozenRecord):
    """One split: the global model on the coordinator's set, each site's model at that site, and these pooled."""

    coordinator: ModelMetrics | None = None
    pooled: ModelMetrics | None = None
    sites: Mapping[SiteId, ModelMetrics] = {}
    comparisons: Mapping[str, EvaluationScores] = {}  # other models at the sites: "global", "cluster"
    models: Mapping[str, ModelMetrics] = {}  # models other than the global one on the coordinator's set

    def overall(self, evaluated_at: EvaluatedAt) -> ModelMetrics | None:
        return self.coordinator if evaluated_at == "coordinator" else self.pooled

    def comparison(self, view: str) -> EvaluationScores:
        """Empty if these models were not evaluated."""
        return self.comparisons.get(view, EvaluationScores())


MetricsBySplit = Mapping[Split, EvaluationScores]


def metric_by_site(sites: Mapping[SiteId, ModelMetrics], metric: str) -> dict[SiteId, float]:
    """Without sites where the metric is undefined."""
    return {site: value for site, metrics in sites.items() if (value := metrics.value(metric)) is not None}


def find_worst_site(sites: Mapping[SiteId, ModelMetrics], metric: str) -> SiteId | None:
    """None unless there are several sites."""
    values = metric_by_site(sites, metric)
    return min(values, key=lambda site: values[site], default=None) if len(sites) > 1 else None


def headline_metric(positive_class: str | None, otherwise: str = "accuracy") -> str:
    """The metric that comes first: the positive class's AUROC if the study names that class."""
    return otherwise if positive_class is None else POSITIVE_AUROC


@dataclass(frozen=True)
class HeadlineScore:
    """The score that stands for a round or a run where there is room for one."""

    split: Split
    metrics: ModelMetrics

    @property
    def metric(self) -> str:
        return self.metrics.headline_metric

    @property
    def value(self) -> float | None:
        return self.metrics.value(self.metric)

    @classmethod
    def select(cls, metrics_by_split: MetricsBySplit) -> HeadlineScore | None:
        """None without an evaluation."""
        for split in HEADLINE_SPLITS:
            scores = metrics_by_split.get(split)
            if scores and (metrics := scores.coordinator or scores.pooled):
                return cls(split, metrics)
        return None
