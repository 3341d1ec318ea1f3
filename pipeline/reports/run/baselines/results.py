"""Results of the federated run and its baselines, ordered from local-only to centralised training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from pipeline.protocol.messages import SiteId
from pipeline.records.run_results import BaselineRecord, BootstrapIntervals, Interval
from pipeline.records.scores import EvaluatedAt, EvaluationScores, RocPoints, find_worst_site, metric_by_site
from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.headline_metric import RANK_BASED_METRICS, HeadlineMetric, find_interval
from pipeline.reports.run.record import RunRecord


@dataclass(frozen=True)
class PlotStyle:
    label: str
    color: str
    marker: str  # shapes differ too, for readers who cannot distinguish the colours
    description: str


PLOT_STYLES: Mapping[str, PlotStyle] = {
    "local_only": PlotStyle(
        "Local only", PALETTE[8], "X", "every site trains alone from the same initial model; its last round"
    ),
    "federated": PlotStyle("Federated", PALETTE[0], "o", "this run"),
    "unprotected": PlotStyle(
        "Federated, unprotected", PALETTE[3], "v", "as this run, without differential privacy and secure aggregation"
    ),
    "normalized": PlotStyle(
        "Federated, normalised", PALETTE[1], "D", "as this run, with colour normalisation at each site"
    ),
    "unskewed": PlotStyle("Federated, unskewed", PALETTE[4], "^", "as this run, on images without the feature skew"),
    "centralized": PlotStyle("Centralised", PALETTE[2], "s", "one model on the pooled data, which hospitals cannot do"),
}


@dataclass(frozen=True)
class BaselineResult:
    name: str
    style: PlotStyle
    test_scores: EvaluationScores
    curve: list[tuple[int, float]]
    curve_metric: str
    intervals: BootstrapIntervals | None
    evaluated_at: EvaluatedAt  # the same for all results, so that they are comparable
    has_several_models: bool = False  # one per site or cluster: rank-based metrics cannot be pooled

    def overall_score(self, metric: str) -> float | None:
        """None for rank-based metrics of several models."""
        if self.has_several_models and metric in RANK_BASED_METRICS:
            return None
        overall = self.test_scores.overall(self.evaluated_at)
        return overall.value(metric) if overall else None

    def score_interval(self, metric: str, site: SiteId | None = None) -> Interval | None:
        return (
            find_interval(self.intervals, metric, site, self.evaluated_at)
            if site or self.overall_score(metric) is not None
            else None
        )

    def scores_by_site(self, metric: str) -> dict[str, float]:
        return metric_by_site(self.test_scores.sites, metric)

    def mean_over_sites(self, metric: str) -> float | None:
        values = self.scores_by_site(metric)
        return fmean(values.values()) if values else None

    def worst_site(self, metric: str) -> str | None:
        return find_worst_site(self.test_scores.sites, metric)

    @property
    def roc_curve(self) -> RocPoints | None:
        overall = self.test_scores.overall(self.evaluated_at)
        curve = overall and overall.roc
        return curve if curve and curve.fpr and not self.has_several_models else None


ResultsByName = Mapping[str, BaselineResult]


def load_baseline_results(record: RunRecord) -> dict[str, BaselineResult]:
    """Results by name; empty if the run has no baselines."""
    run_results = record.results
    if run_results is None:
        return {}
    recorded_baselines = {
        name: baseline
        for name, baseline in run_results.baselines.items()
        if baseline.curve or baseline.test != EvaluationScores()
    }
    if not recorded_baselines:
        return {}
    evaluated_at: EvaluatedAt = "pooled" if run_results.test.pooled else "coordinator"
    federated = BaselineRecord(test=run_results.test, intervals=run_results.intervals, metric="accuracy", curve=())
    entries = {**recorded_baselines, "federated": federated}
    ordered_names = [name for name in PLOT_STYLES if name in entries] + [
        name for name in entries if name not in PLOT_STYLES
    ]
    return {name: _baseline_result(name, entries[name], evaluated_at, record) for name in ordered_names}


def _baseline_result(name: str, entry: BaselineRecord, evaluated_at: EvaluatedAt, record: RunRecord) -> BaselineResult:
    spaced_name = name.replace("_", " ")
    style = PLOT_STYLES.get(name) or PlotStyle(spaced_name[:1].upper() + spaced_name[1:], PALETTE[5], "P", "")
    uses_run_strategy = name not in ("local_only", "centralized")  # the run's own strategy
    if name == "federated" and record.has_personalized_models:
        style = replace(style, description="this run, every site with its personalised model")
    return BaselineResult(
        name=name,
        style=style,
        test_scores=entry.test,
        curve=[(round_number, value) for round_number, value in entry.curve if value is not None],
        curve_metric=entry.metric,
        # intervals are of the global model
        intervals=None if uses_run_strategy and record.has_personalized_models else entry.intervals,
        evaluated_at=evaluated_at,
        has_several_models=record.has_several_models if uses_run_strategy else name == "local_only",
    )


def shared_metric(results: ResultsByName, headline: HeadlineMetric) -> str:
    """The headline metric if some baseline has it, else accuracy (runs of older versions)."""
    baselines = (result for result in results.values() if result.name != "federated")
    is_available = any(
        result.overall_score(headline.metric) is not None or result.scores_by_site(headline.metric)
        for result in baselines
    )
    return headline.metric if is_available else "accuracy"
