"""The headline metric of a run: which metric comes first in reports, on whose data, and with which intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pipeline.reports.document.formatting import METRIC_LABELS, format_interval, format_score, metric_label
from pipeline.reports.document.page import TableCell
from pipeline.reports.run.record import JsonObject, RunRecord, finite_or_none, metric_by_site

ScoreInterval = tuple[float, float]
DATA_LABELS = {"coordinator": "coordinator's set", "pooled": "all sites"}
DETECTION_METRICS = ("positive_auroc", "sensitivity_at_specificity", "positive_auprc")  # in the order shown
# these rank the scores of all examples, so they are undefined where the scores come from several models
RANK_BASED_METRICS = frozenset({"auroc", "auprc", *DETECTION_METRICS})
RANK_BASED_KEYS = frozenset({*RANK_BASED_METRICS, "roc", "pr", "class_auroc"})


@dataclass(frozen=True)
class HeadlineMetric:
    metric: str  # the positive class's AUROC, else the study's selection metric, else accuracy
    positive_class: str | None
    target_specificity: float
    intervals: JsonObject  # of the scores shown first; empty if none were computed
    has_several_models: bool = False  # the sites' scores come from several models
    global_model_intervals: JsonObject = field(default_factory=dict)  # only of runs with personalised models

    @classmethod
    def from_record(cls, record: RunRecord) -> HeadlineMetric:
        evaluation: JsonObject = record.settings.get("evaluation") or {}
        results = record.results or {}
        positive_class = results.get("positive_class") or evaluation.get("positive_class")
        recorded_intervals: JsonObject = results.get("intervals") or {}  # always of the global model
        intervals: JsonObject = {} if record.has_personalized_models else recorded_intervals
        selection_metric = "positive_auroc" if positive_class else str(evaluation.get("selection_metric", "accuracy"))
        scores = (
            replace_pooled_rank_metrics(record.latest_scores()[1])
            if record.has_several_models
            else record.latest_scores()[1]
        )
        _, main_metrics = select_main_scores(scores, "pooled" in intervals or record.has_several_models)
        is_recorded = (
            selection_metric in METRIC_LABELS
            and selection_metric != "loss"
            and finite_or_none(main_metrics.get(selection_metric)) is not None
        )
        target_specificity = finite_or_none(evaluation.get("target_specificity")) or 0.95
        positive_name = str(positive_class) if positive_class else None
        global_model_intervals = recorded_intervals if record.has_personalized_models else {}
        return cls(
            selection_metric if is_recorded else "accuracy",
            positive_name,
            target_specificity,
            intervals,
            record.has_several_models,
            global_model_intervals,
        )

    def comparable_scores(self, scores: JsonObject) -> JsonObject:
        """`scores` without pooled rank-based metrics where these are undefined."""
        return replace_pooled_rank_metrics(scores) if self.has_several_models else scores

    def overall_scores(self, scores: JsonObject) -> tuple[str, JsonObject]:
        """(label of the data, metrics): pooled scores first if they have intervals or come from several models."""
        return select_main_scores(scores, pooled_first="pooled" in self.intervals or self.has_several_models)

    def metric_title(self, metric: str) -> str:
        specificity_text = f"{100 * self.target_specificity:g} % specificity"
        if metric == "sensitivity_at_specificity":
            return f"Sensitivity at {specificity_text}"
        if self.positive_class and metric.startswith("positive_"):
            return f"{metric_label(metric.removeprefix('positive_'))}, {self.positive_class}"
        return metric_label(metric)

    def score_interval(
        self, metric: str, site: str | None = None, evaluated_at: str = "pooled"
    ) -> ScoreInterval | None:
        """The interval of one site, or of all ("pooled" or "coordinator")."""
        return find_interval(self.intervals, metric, site, evaluated_at)

    def format_cell(self, metric: str, value: float | None, interval: ScoreInterval | None) -> TableCell:
        score_text = format_score(metric, value)
        return score_text if value is None or interval is None else (score_text, format_interval(metric, *interval))

    def table_metrics(self, score_rows: Sequence[JsonObject], num_classes: int) -> list[str]:
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
            if metric not in hidden_metrics
            and any(finite_or_none(metrics.get(metric)) is not None for metrics in score_rows)
        ]

    def site_ranking_metric(self, sites: JsonObject) -> str:
        """The headline metric if some site has it, else accuracy (a site may lack positive examples)."""
        return self.metric if metric_by_site(sites, self.metric) else "accuracy"

    def short_metric_title(self, metric: str) -> str:
        """The metric's name inside a sentence, without the class."""
        name = self.metric_title(metric).split(",")[0]
        return name if name.isupper() else name[:1].lower() + name[1:]

    @property
    def confidence_level(self) -> str:
        return f"{100 * (finite_or_none((self.intervals or self.global_model_intervals).get('level')) or 0.95):g} %"

    @property
    def interval_method_text(self) -> str:
        """How the intervals were computed; empty if the run has none."""
        if not self.intervals:
            return ""
        unit = str(self.intervals.get("unit") or "unit")
        num_units, num_draws = finite_or_none(self.intervals.get("units")), finite_or_none(self.intervals.get("draws"))
        if not any(self.intervals.get(evaluated_at) for evaluated_at in DATA_LABELS):
            shortage_text = f"{num_units:,.0f} {unit}s in the test data are" if num_units else "There are"
            return f"No intervals: {shortage_text} too few to estimate the sampling error of a score. Interpret differences with care."
        units_text, draws_text = (
            f" ({num_units:,.0f} in the test data)" if num_units else "",
            f", {num_draws:,.0f} times" if num_draws else "",
        )
        return (
            f"In brackets, {self.confidence_level} intervals: a bootstrap that draws whole {unit}s{units_text} with replacement{draws_text}. "
            f"They show the variation from sampling {unit}s, not the variation between training runs."
            + (
                f" Sites with fewer than {self.intervals['fewest']} {unit}s have no interval."
                if self._has_missing_intervals
                else ""
            )
        )

    @property
    def _has_missing_intervals(self) -> bool:
        return "fewest" in self.intervals and any(
            not site_intervals for site_intervals in (self.intervals.get("sites") or {}).values()
        )


def find_interval(
    intervals: JsonObject, metric: str, site: str | None = None, evaluated_at: str = "pooled"
) -> ScoreInterval | None:
    intervals_by_metric: JsonObject | None = (
        (intervals.get("sites") or {}).get(site) if site else intervals.get(evaluated_at)
    )
    edges = [finite_or_none(edge) for edge in (intervals_by_metric or {}).get(metric) or ()]
    low, high = edges if len(edges) == 2 else (None, None)
    return None if low is None or high is None else (low, high)


def select_main_scores(scores: JsonObject, pooled_first: bool = False) -> tuple[str, JsonObject]:
    """(label of the data, metrics): of the coordinator's set, else of all sites pooled, else the mean over sites."""
    for evaluated_at in ("pooled", "coordinator") if pooled_first else ("coordinator", "pooled"):
        if scores.get(evaluated_at):
            return DATA_LABELS[evaluated_at], scores[evaluated_at]
    by_metric = {metric: metric_by_site(scores.get("sites") or {}, metric).values() for metric in METRIC_LABELS}
    means = {metric: fmean(values) for metric, values in by_metric.items() if values}
    return ("mean over sites" if means else "", means)


def replace_pooled_rank_metrics(scores: JsonObject) -> JsonObject:
    """Replaces pooled rank-based metrics by their means over sites and removes the pooled curves."""
    pooled: JsonObject = scores.get("pooled") or {}
    if not pooled:
        return scores
    kept_scores = {metric: value for metric, value in pooled.items() if metric not in RANK_BASED_KEYS}
    return {**scores, "pooled": kept_scores | mean_rank_metrics(scores.get("sites") or {})}


def mean_rank_metrics(sites: JsonObject) -> dict[str, float]:
    values_by_metric = {metric: metric_by_site(sites, metric) for metric in RANK_BASED_METRICS}
    return {metric: fmean(values.values()) for metric, values in values_by_metric.items() if values}


def find_worst_site(sites: JsonObject, metric: str) -> str | None:
    known_scores = metric_by_site(sites, metric)
    return min(known_scores, key=lambda site: known_scores[site]) if len(sites) > 1 and known_scores else None
