"""The report section on hierarchies (DemLearn): specialisation and generalisation of each level's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Split
from pipeline.records.scores import EvaluationScores, ModelMetrics, metric_by_site
from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.document.formatting import (
    PERCENT_METRICS,
    SPLIT_LABELS,
    UNDEFINED_TEXT,
    format_points,
    format_score,
)
from pipeline.reports.document.page import ReportWriter, TableCell, TableColumn
from pipeline.reports.run import curves as figures
from pipeline.reports.run.curves import CurveSeries
from pipeline.reports.run.headline_metric import RANK_BASED_METRICS, HeadlineMetric
from pipeline.reports.run.record import RunRecord

SPECIALIZATION_TITLE, GENERALIZATION_TITLE = "Specialisation", "Generalisation"
LEVEL_STYLES: Mapping[str, tuple[str, str]] = {  # level -> (name, colour)
    "site": ("Site models", PALETTE[0]),
    "cluster": ("Cluster models", PALETTE[2]),
    "top": ("Global model", PALETTE[1]),
}


@dataclass(frozen=True)
class LevelScores:
    specialization: float | None  # on the data of the sites that use the model
    generalization: float | None  # on the coordinator's set

    @property
    def is_known(self) -> bool:
        return self.specialization is not None or self.generalization is not None


def add_hierarchy_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    split, scores = record.latest_scores()
    cluster_by_site = next((line.clusters for line in record.round_records if line.round == record.result_round), {})
    metric = headline.metric
    scores_by_level = level_scores(scores, cluster_by_site, metric)
    if not any(level.generalization is not None for name, level in scores_by_level.items() if name != "top"):
        return
    writer.page.add_section("Specialisation and generalisation").add_text(
        *_describe_levels(scores_by_level, metric, _has_feature_skew(record))
    )
    _add_levels_table(writer, scores_by_level, headline, metric, split)
    _add_level_curves(writer, record, headline, metric)


def _has_feature_skew(record: RunRecord) -> bool:
    skew_setting = record.settings.get("feature_skew") or "none"
    return (skew_setting.get("name") if isinstance(skew_setting, Mapping) else skew_setting) != "none"


def level_scores(
    scores: EvaluationScores, cluster_by_site: Mapping[SiteId, str], metric: str
) -> dict[str, LevelScores]:
    """Scores by level; empty if the run has one model.

    `cluster_by_site`: site -> its lowest cluster; models of intermediate clusters are left out.
    """
    model_scores = scores.models
    site_models = {name: found for name, found in model_scores.items() if name.startswith("site/")}
    lowest_clusters = {f"cluster/{cluster}" for cluster in cluster_by_site.values()}
    cluster_models = {name: found for name, found in model_scores.items() if name.startswith("cluster/")}
    used_models = {name: found for name, found in cluster_models.items() if name in lowest_clusters} or cluster_models
    # sites without a model of their own use their cluster's
    cluster_view = scores.comparisons.get("cluster", EvaluationScores() if site_models else scores)
    found = {
        "site": LevelScores(_specialization_score(scores, metric), _mean_score(site_models, metric))
        if site_models
        else LevelScores(None, None),
        "cluster": LevelScores(_specialization_score(cluster_view, metric), _mean_score(used_models, metric))
        if used_models
        else LevelScores(None, None),
        "top": LevelScores(
            _specialization_score(scores.comparison("global"), metric),
            scores.coordinator.value(metric) if scores.coordinator else None,
        ),
    }
    return {name: level for name, level in found.items() if level.is_known} if model_scores else {}


def _specialization_score(scores: EvaluationScores, metric: str) -> float | None:
    """Pooled; of rank-based metrics the mean over sites, as the scores come from several models."""
    if metric in RANK_BASED_METRICS:
        return _mean_score(scores.sites, metric)
    return scores.pooled.value(metric) if scores.pooled else None


def _mean_score(model_scores: Mapping[str, ModelMetrics], metric: str) -> float | None:
    values = metric_by_site(model_scores, metric)
    return fmean(values.values()) if values else None


def _describe_levels(scores_by_level: Mapping[str, LevelScores], metric: str, has_feature_skew: bool) -> list[str]:
    definition = (
        f"{SPECIALIZATION_TITLE}: score of a model on the data of the sites that use it. {GENERALIZATION_TITLE}: score on the "
        f"coordinator's set, which is not from the sites{' and has no feature skew' if has_feature_skew else ''}."
    )
    labeled_scores = [
        (LEVEL_STYLES[name][0], level.specialization, level.generalization) for name, level in scores_by_level.items()
    ]
    best_specialized = max(((value, name) for name, value, _ in labeled_scores if value is not None), default=None)
    best_generalized = max(((value, name) for name, _, value in labeled_scores if value is not None), default=None)
    if best_specialized is None or best_generalized is None or len(scores_by_level) < 2:
        return [definition]
    specialization_text = (
        f"Best specialisation: {_lower_first(best_specialized[1])}, {format_score(metric, best_specialized[0])}"
    )
    return [
        definition,
        f"{specialization_text}; best generalisation: {_lower_first(best_generalized[1])}, {format_score(metric, best_generalized[0])}.",
    ]


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _add_levels_table(
    writer: ReportWriter,
    scores_by_level: Mapping[str, LevelScores],
    headline: HeadlineMetric,
    metric: str,
    split: Split,
) -> None:
    rows: list[list[TableCell]] = []
    for name, level in scores_by_level.items():
        gap = UNDEFINED_TEXT
        if level.specialization is not None and level.generalization is not None:
            gap = format_points(level.specialization - level.generalization)
        rows.append(
            [
                LEVEL_STYLES[name][0],
                format_score(metric, level.specialization),
                format_score(metric, level.generalization),
                gap,
            ]
        )
    columns = [
        TableColumn("Level"),
        TableColumn(SPECIALIZATION_TITLE, True),
        TableColumn(GENERALIZATION_TITLE, True),
        TableColumn("Difference, points", True),
    ]
    pooling_text = "mean over sites" if metric in RANK_BASED_METRICS else "pooled over sites"
    caption = f"{headline.metric_title(metric)} on {SPLIT_LABELS[split]} data. {SPECIALIZATION_TITLE}: {pooling_text}; {_lower_first(GENERALIZATION_TITLE)}: mean over the models."
    writer.page.add_table(columns, rows, caption)


def _add_level_curves(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric, metric: str) -> None:
    split = record.most_evaluated_split()
    levels_by_round = {
        line.round: level_scores(line.metrics[split], line.clusters, metric)
        for line in record.round_records
        if split in line.metrics
    }
    specialization_series = _level_series(
        {
            round_number: {level_name: level.specialization for level_name, level in scores_by_level.items()}
            for round_number, scores_by_level in levels_by_round.items()
        }
    )
    generalization_series = _level_series(
        {
            round_number: {level_name: level.generalization for level_name, level in scores_by_level.items()}
            for round_number, scores_by_level in levels_by_round.items()
        }
    )
    y_limits = _shared_y_limits([*specialization_series, *generalization_series], metric in PERCENT_METRICS)
    for key, title, series in (
        ("specialisation", SPECIALIZATION_TITLE, specialization_series),
        ("generalisation", GENERALIZATION_TITLE, generalization_series),
    ):
        if any(len(curve.rounds) > 1 for curve in series):
            figure_title = f"{title}: {headline.short_metric_title(metric)}"
            figure = figures.plot_curves(series, figure_title, percent=metric in PERCENT_METRICS, y_limits=y_limits)
            data_label = (
                "the data of the sites that use a model" if series is specialization_series else "the coordinator's set"
            )
            writer.add_figure(
                key,
                figure,
                f"{title}: {headline.metric_title(metric)} on {data_label}, {SPLIT_LABELS[split]} examples, by round.",
            )


def _level_series(by_round: Mapping[int, Mapping[str, float | None]]) -> list[CurveSeries]:
    series = []
    has_several_levels = len({name for level_values in by_round.values() for name in level_values}) > 1
    for name, (label, color) in LEVEL_STYLES.items():
        round_values = [
            (round_number, value)
            for round_number, level_values in sorted(by_round.items())
            if (value := level_values.get(name)) is not None
        ]
        if round_values:
            round_numbers, values = (
                [round_number for round_number, _ in round_values],
                [value for _, value in round_values],
            )
            series.append(
                CurveSeries(
                    label, round_numbers, values, is_dashed=has_several_levels and name == "cluster", color=color
                )
            )
    return series


def _shared_y_limits(series: Sequence[CurveSeries], percent: bool) -> tuple[float, float] | None:
    """The same limits for both figures, so that they can be compared."""
    values = [value for curve in series for value in curve.values]
    if not values:
        return None
    padding = 0.05 * (max(values) - min(values)) or 0.01
    scale = 100 if percent else 1
    return scale * max(0.0, min(values) - padding), scale * min(1.0, max(values) + padding)
