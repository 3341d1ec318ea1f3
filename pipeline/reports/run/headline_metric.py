"""The headline metric of a run: which metric comes first in reports, on whose data, and with which intervals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.protocol.messages import SiteId
from pipeline.records.run_results import BootstrapIntervals, Interval
from pipeline.records.scores import EvaluatedAt, EvaluationScores, ModelMetrics, headline_metric, metric_by_site
from pipeline.reports.document.formatting import METRIC_LABELS, format_interval, format_score, metric_label
from pipeline.reports.document.page import TableCell
from pipeline.reports.run.record import RunRecord, Settings

DATA_LABELS: Mapping[EvaluatedAt, str] = {"coordinator": "coordinator's set", "pooled": "all sites"}
DEFAULT_CONFIDENCE_LEVEL, DEFAULT_TARGET_SPECIFICITY = 0.95, 0.95
DETECTION_METRICS = ("positive_auroc", "sensitivity_at_specificity", "positive_auprc")  # in the order shown
# these rank the scores of all examples, so they are undefined where the scores come from several models
RANK_BASED_METRICS = frozenset({"auroc", "auprc", *DETECTION_METRICS})
RANK_BASED_FIELDS = frozenset({*RANK_BASED_METRICS, "roc", "pr", "class_auroc"})


@dataclass(frozen=True)
class HeadlineMetric:
    metric: str  # the positive class's AUROC, else the study's selection metric, else accuracy
    positive_class: str | None
    target_specificity: float
    intervals: BootstrapIntervals | None = None  # of the scores shown first
    has_several_models: bool = False  # the sites' scores come from several models
    global_model_intervals: BootstrapIntervals | None = None  # only of runs with personalised models

    @classmethod
    def from_record(cls, record: RunRecord) -> HeadlineMetric:
        evaluation: Settings = record.settings.get("evaluation") or {}
        positive_class = (record.results and record.results.positive_class) or evaluation.get("positive_class")
        recorded_intervals = record.results.intervals if record.results else None  # always of the global model
        intervals = None if record.has_personalized_models else recorded_intervals
        metric = headline_metric(positive_class, otherwise=str(evaluation.get("selection_metric", "accuracy")))
        scores = record.latest_scores()[1]
        if record.has_several_models:
            scores = replace_pooled_rank_metrics(scores)
        _, main_metrics = select_main_scores(scores, _has_pooled(intervals) or record.has_several_models)
        is_recorded = metric in METRIC_LABELS and metric != "loss" and main_metrics.value(metric) is not None
        return cls(
            metric if is_recorded else "accuracy",
            positive_class,
            float(evaluation.get("target_specificity") or DEFAULT_TARGET_SPECIFICITY),
            intervals,
            record.has_several_models,
            recorded_intervals if record.has_personalized_models else None,
        )

    def comparable_scores(self, scores: EvaluationScores) -> EvaluationScores:
        """`scores` without pooled rank-based metrics where these are undefined."""
        return replace_pooled_rank_metrics(scores) if self.has_several_models else scores

    def overall_scores(self, scores: EvaluationScores) -> tuple[str, ModelMetrics]:
        """(label of the data, metrics): pooled scores first if they have intervals or come from several models."""
        return select_main_scores(scores, pooled_first=_has_pooled(self.intervals) or self.has_several_models)

    def metric_title(self, metric: str) -> str:
        specificity_text = f"{100 * self.target_specificity:g} % specificity"
        if metric == "sensitivity_at_specificity":
            return f"Sensitivity at {specificity_text}"
        if self.positive_class and metric.startswith("positive_"):
            return f"{metric_label(metric.removeprefix('positive_'))}, {self.positive_class}"
        return metric_label(metric)

    def score_interval(
        self, metric: str, site: SiteId | None = None, evaluated_at: EvaluatedAt = "pooled"
    ) -> Interval | None:
        """The interval of one site, or of all ("pooled" or "coordinator")."""
        return find_interval(self.intervals, metric, site, evaluated_at)

    def format_cell(self, metric: str, value: float | None, interval: Interval | None) -> TableCell:
        score_text = format_score(metric, value)
        return score_text if value is None or interval is None else (score_text, format_interval(metric, *interval))

    def table_metrics(self, score_rows: Sequence[ModelMetrics], num_classes: int) -> list[str]:
        """The metrics that some row has, the headline metric first.

        With two classes and a positive one, averages over classes are left out: they add no information.
        """
        leading_metrics = [*DETECTION_METRICS, "accuracy"] if self.positive_class else [self.metric]
        ordered_metrics = dict.fromkeys([*leading_metrics, *METRIC_LABELS])
        hidden_metrics = (
            {"auroc", "auprc", "macro_f1"} if self.metric in DETECTION_METRICS and num_classes == 2 else set()
        )
        return [
            metric
            for metric in ordered_metrics
            if metric not in hidden_metrics and any(metrics.value(metric) is not None for metrics in score_rows)
        ]

    def site_ranking_metric(self, sites: Mapping[SiteId, ModelMetrics]) -> str:
        """The headline metric if some site has it, else accuracy (a site may lack positive examples)."""
        return self.metric if metric_by_site(sites, self.metric) else "accuracy"

    def short_metric_title(self, metric: str) -> str:
        """The metric's name inside a sentence, without the class."""
        name = self.metric_title(metric).split(",")[0]
        return name if name.isupper() else name[:1].lower() + name[1:]

    @property
    def confidence_level(self) -> str:
        intervals = self.intervals or self.global_model_intervals
        return f"{100 * (intervals.confidence_level if intervals else DEFAULT_CONFIDENCE_LEVEL):g} %"

    @property
    def interval_method_text(self) -> str:
        """How the intervals were computed; empty if the run has none."""
        intervals = self.intervals
        if not intervals:
            return ""
        unit = intervals.privacy_unit
        if not any(intervals.overall(evaluated_at) for evaluated_at in DATA_LABELS):
            return (
                f"No intervals: {intervals.num_units:,} {unit}s in the test data are too few to estimate the sampling error of a score. "
                "Interpret differences with care."
            )
        missing_text = f" Sites with fewer than {intervals.min_units} {unit}s have no interval."
        return (
            f"In brackets, {self.confidence_level} intervals: a bootstrap that draws whole {unit}s "
            f"({intervals.num_units:,} in the test data) with replacement, {intervals.num_resamples:,} times. "
            f"They show the variation from sampling {unit}s, not the variation between training runs."
            + ("" if all(intervals.sites.values()) else missing_text)
        )


def _has_pooled(intervals: BootstrapIntervals | None) -> bool:
    return intervals is not None and "pooled" in intervals.model_fields_set


def find_interval(
    intervals: BootstrapIntervals | None, metric: str, site: SiteId | None = None, evaluated_at: EvaluatedAt = "pooled"
) -> Interval | None:
    if intervals is None:
        return None
    return (intervals.sites.get(site, {}) if site else intervals.overall(evaluated_at)).get(metric)


def select_main_scores(scores: EvaluationScores, pooled_first: bool = False) -> tuple[str, ModelMetrics]:
    """(label of the data, metrics): of the coordinator's set, else of all sites pooled, else the mean over sites."""
    order: tuple[EvaluatedAt, ...] = ("pooled", "coordinator") if pooled_first else ("coordinator", "pooled")
    for evaluated_at in order:
        if metrics := scores.overall(evaluated_at):
            return DATA_LABELS[evaluated_at], metrics
    means = _means_over_sites(scores.sites, METRIC_LABELS)
    num_examples = sum(metrics.n for metrics in scores.sites.values())
    return ("mean over sites" if means else "", ModelMetrics.model_validate({"n": num_examples, **means}))


def replace_pooled_rank_metrics(scores: EvaluationScores) -> EvaluationScores:
    """Replaces pooled rank-based metrics by their means over sites and removes the pooled curves."""
    if scores.pooled is None:
        return scores
    fields = dict.fromkeys(RANK_BASED_FIELDS & scores.pooled.model_fields_set) | _means_over_sites(
        scores.sites, RANK_BASED_METRICS
    )
    return scores.model_copy(update={"pooled": scores.pooled.model_copy(update=fields)})


def _means_over_sites(sites: Mapping[SiteId, ModelMetrics], metrics: Collection[str]) -> dict[str, float]:
    values_by_metric = {metric: metric_by_site(sites, metric) for metric in metrics}
    return {metric: fmean(values.values()) for metric, values in values_by_metric.items() if values}
