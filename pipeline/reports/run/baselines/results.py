"""Results of the federated run and its baselines, ordered from local-only to centralised training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.headline_metric import (
    RANK_BASED_METRICS,
    HeadlineMetric,
    ScoreInterval,
    find_interval,
    find_worst_site,
)
from pipeline.reports.run.record import JsonObject, RunRecord, finite_or_none, metric_by_site


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
    test_scores: JsonObject
    curve: list[tuple[int, float]]
    curve_metric: str
    intervals: JsonObject
    evaluated_at: str  # "coordinator" or "pooled", the same for all results, so that they are comparable
    has_several_models: bool = False  # one per site or cluster: rank-based metrics cannot be pooled

    def overall_score(self, metric: str) -> float | None:
        """None for rank-based metrics of several models."""
        if self.has_several_models and metric in RANK_BASED_METRICS:
            return None
        return finite_or_none((self.test_scores.get(self.evaluated_at) or {}).get(metric))

    def score_interval(self, metric: str, site: str | None = None) -> ScoreInterval | None:
        return (
            find_interval(self.intervals, metric, site, self.evaluated_at)
            if site or self.overall_score(metric) is not None
            else None
        )

    def scores_by_site(self, metric: str) -> dict[str, float]:
        return metric_by_site(self.test_scores.get("sites") or {}, metric)

    def mean_over_sites(self, metric: str) -> float | None:
        values = self.scores_by_site(metric)
        return fmean(values.values()) if values else None

    def worst_site(self, metric: str) -> str | None:
        return find_worst_site(self.test_scores.get("sites") or {}, metric)

    @property
    def roc_curve(self) -> JsonObject | None:
        curve: JsonObject | None = (self.test_scores.get(self.evaluated_at) or {}).get("roc")
        return curve if curve and curve.get("fpr") and not self.has_several_models else None


ResultsByName = Mapping[str, BaselineResult]


def load_baseline_results(record: RunRecord) -> dict[str, BaselineResult]:
    """Results by name; empty if the run has no baselines."""
    run_results = record.results or {}
    baselines: JsonObject = run_results.get("baselines") or {}
    test_scores: JsonObject = run_results.get("test") or {}
    recorded_baselines = {
        name: baseline
        for name, baseline in baselines.items()
        if (baseline or {}).get("test") or (baseline or {}).get("curve")
    }
    if not recorded_baselines or not test_scores:
        return {}
    evaluated_at = "pooled" if test_scores.get("pooled") else "coordinator"
    entries = {**recorded_baselines, "federated": {"test": test_scores, "intervals": run_results.get("intervals")}}
    ordered_names = [name for name in PLOT_STYLES if name in entries] + [
        name for name in entries if name not in PLOT_STYLES
    ]
    return {name: _baseline_result(name, entries[name], evaluated_at, record) for name in ordered_names}


def _baseline_result(name: str, entry: JsonObject, evaluated_at: str, record: RunRecord) -> BaselineResult:
    spaced_name = name.replace("_", " ")
    style = PLOT_STYLES.get(name) or PlotStyle(spaced_name[:1].upper() + spaced_name[1:], PALETTE[5], "P", "")
    curve = [
        (int(round_number), value)
        for round_number, value in entry.get("curve") or ()
        if finite_or_none(value) is not None
    ]
    uses_run_strategy = name not in ("local_only", "centralized")  # the run's own strategy
    has_several_models = record.has_several_models if uses_run_strategy else name == "local_only"
    intervals: JsonObject = (
        {} if uses_run_strategy and record.has_personalized_models else entry.get("intervals") or {}
    )  # they are of the global model
    if name == "federated" and record.has_personalized_models:
        style = replace(style, description="this run, every site with its personalised model")
    metric = str(entry.get("metric") or "accuracy")
    return BaselineResult(
        name=name,
        style=style,
        test_scores=entry.get("test") or {},
        curve=curve,
        curve_metric=metric,
        intervals=intervals,
        evaluated_at=evaluated_at,
        has_several_models=has_several_models,
    )


def shared_metric(results: ResultsByName, headline: HeadlineMetric) -> str:
    """The headline metric if some baseline has it, else accuracy (runs of older versions)."""
    baselines = (result for result in results.values() if result.name != "federated")
    is_available = any(
        result.overall_score(headline.metric) is not None or result.scores_by_site(headline.metric)
        for result in baselines
    )
    return headline.metric if is_available else "accuracy"
