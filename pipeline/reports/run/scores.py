"""Report sections on scores: headline tiles, results by site and learning curves; and the figures of one model's scores.

A section adds nothing if the run has no data for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import TYPE_CHECKING, Any

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Split
from pipeline.records.scores import (
    EvaluatedAt,
    EvaluationScores,
    ModelMetrics,
    PrPoints,
    RocPoints,
    find_worst_site,
    metric_by_site,
)
from pipeline.reports.document.figure_style import (
    FULL_WIDTH_INCHES,
    HALF_WIDTH_INCHES,
    INK_COLOR,
    PALETTE,
    apply_figure_style,
    new_figure,
)
from pipeline.reports.document.formatting import (
    METRIC_LABELS,
    PERCENT_METRICS,
    SPLIT_LABELS,
    format_bytes,
    format_duration,
    format_integer,
    format_score,
    shorten_text,
)
from pipeline.reports.document.page import COORDINATOR_LABEL, POOLED_LABEL, ReportWriter, TableCell, TableColumn
from pipeline.reports.run import curves as figures
from pipeline.reports.run.curves import BandLevel, CurveSeries
from pipeline.reports.run.headline_metric import DETECTION_METRICS, RANK_BASED_METRICS, HeadlineMetric
from pipeline.reports.run.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERALL_TEST_SETS: Sequence[tuple[EvaluatedAt, str]] = (("coordinator", COORDINATOR_LABEL), ("pooled", POOLED_LABEL))
MAX_LISTED_SITES = 24  # with more sites, the table lists only the weakest, and a folded table lists all
NUM_WEAKEST_SITES = 10
MAX_SITE_CURVES, MAX_CURVE_POINTS = 40, 100  # of single sites' ROC curves
MAX_HALF_WIDTH_CLASSES = 6  # of a confusion matrix at half width, with fractions below the counts
BAND_DESCRIPTIONS: Mapping[BandLevel, str] = {
    "68": "The band is one standard deviation over sites (68 %).",
    "95": "The band is 1.96 standard deviations over sites (95 %).",
}


def add_headline_tiles(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    split, scores = _comparable_scores(record, headline)
    data_label, main_metrics = headline.overall_scores(scores)
    is_detection = headline.metric in DETECTION_METRICS
    detection_metrics = [
        metric for metric in DETECTION_METRICS if is_detection and main_metrics.value(metric) is not None
    ]
    tiles: list[tuple[str, TableCell]] = [
        (headline.metric_title(metric), _score_cell(headline, metric, main_metrics, scores))
        for metric in dict.fromkeys([*detection_metrics, headline.metric, "accuracy"])
    ]
    if data_label:
        if headline.has_several_models and main_metrics is scores.pooled:
            data_label = "mean over sites" if headline.metric in RANK_BASED_METRICS else data_label
            data_label += ", personalised models" if record.has_personalized_models else ""
        tiles[0] = (f"{tiles[0][0]}, {SPLIT_LABELS[split]} ({data_label})", tiles[0][1])
    sites = scores.sites
    ranking_metric = headline.site_ranking_metric(sites)
    if worst_site := find_worst_site(sites, ranking_metric):
        value = format_score(ranking_metric, sites[worst_site].value(ranking_metric))
        tiles.append(
            (f"Lowest {headline.short_metric_title(ranking_metric)} of a site: {shorten_text(worst_site)}", value)
        )
    writer.page.add_tiles(tiles, lead=True).add_tiles(_run_facts(record))


def _comparable_scores(record: RunRecord, headline: HeadlineMetric) -> tuple[Split, EvaluationScores]:
    split, scores = record.latest_scores()
    return split, headline.comparable_scores(scores)


def _run_facts(record: RunRecord) -> list[tuple[str, TableCell]]:
    results = record.results
    return [
        ("Best round", format_integer(results.best_round if results else None)),
        ("Sites", format_integer(len(record.sites))),
        ("Rounds", format_integer(results.rounds if results else record.last_round)),
        ("Traffic, both ways", format_bytes(record.uplink_bytes + record.downlink_bytes)),
        ("Time", format_duration(record.seconds)),
    ]


def _score_cell(headline: HeadlineMetric, metric: str, metrics: ModelMetrics, scores: EvaluationScores) -> TableCell:
    interval = next(
        (
            headline.score_interval(metric, evaluated_at=evaluated_at)
            for evaluated_at, _ in OVERALL_TEST_SETS
            if metrics is scores.overall(evaluated_at)
        ),
        None,
    )
    return headline.format_cell(metric, metrics.value(metric), interval)


def add_results_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    split, scores = _comparable_scores(record, headline)
    sites = scores.sites
    recorded_sets = [
        (evaluated_at, label, metrics)
        for evaluated_at, label in OVERALL_TEST_SETS
        if (metrics := scores.overall(evaluated_at))
    ]
    metrics_by_row = [metrics for _, _, metrics in recorded_sets] + list(sites.values())
    if not metrics_by_row:
        return
    shown_metrics = headline.table_metrics(metrics_by_row, len(record.site_data.classes))
    overall_rows = [
        (_overall_label(record, headline, evaluated_at, label, shown_metrics), metrics)
        for evaluated_at, label, metrics in recorded_sets
    ]
    overall_cells: list[list[TableCell]] = [
        [
            label,
            format_integer(metrics.n),
            *(_score_cell(headline, metric, metrics, scores) for metric in shown_metrics),
        ]
        for label, metrics in overall_rows
    ]
    columns = [
        TableColumn("Evaluated on"),
        TableColumn("Examples", True),
        *(TableColumn(headline.metric_title(metric), True) for metric in shown_metrics),
    ]
    ranking_metric = headline.site_ranking_metric(sites)
    listed_sites = _weakest_sites(sites, ranking_metric) if len(sites) > MAX_LISTED_SITES else list(sites)
    worst_site = find_worst_site(sites, ranking_metric)
    highlighted_row = len(overall_rows) + listed_sites.index(worst_site) if worst_site else None
    rows = overall_cells + [_site_row(headline, site, sites[site], shown_metrics) for site in listed_sites]
    caption = (
        f"All together, and the {len(listed_sites)} weakest of {len(sites):,} sites"
        if len(listed_sites) < len(sites)
        else ""
    )
    writer.page.add_section(f"Results on {SPLIT_LABELS[split]} data").add_text(
        *_describe_results(record, headline, sites)
    )
    writer.page.add_table(
        columns, rows, caption, highlight=highlighted_row, badge=f"lowest {headline.short_metric_title(ranking_metric)}"
    )
    if caption:
        all_rows = [_site_row(headline, site, metrics, shown_metrics) for site, metrics in sites.items()]
        writer.page.add_table(columns, all_rows, f"All {len(sites):,} sites")


def _overall_label(
    record: RunRecord, headline: HeadlineMetric, evaluated_at: EvaluatedAt, label: str, shown_metrics: Sequence[str]
) -> TableCell:
    """The row's heading; where there are several models, it says which ones were evaluated."""
    if not headline.has_several_models:
        return label
    if evaluated_at == "coordinator":
        return label, "the global model"
    uses_clusters = not record.has_personalized_models and any(
        round_record.clusters for round_record in record.round_records
    )
    models_text = "every site with its cluster's model" if uses_clusters else "every site with its own model"
    return label, f"{models_text}; rank-based scores are means over sites" if RANK_BASED_METRICS & {
        *shown_metrics
    } else models_text


def _weakest_sites(sites: Mapping[SiteId, ModelMetrics], metric: str) -> list[str]:
    known_scores = metric_by_site(sites, metric)
    return (
        sorted(known_scores, key=lambda site: known_scores[site])[:NUM_WEAKEST_SITES] or list(sites)[:NUM_WEAKEST_SITES]
    )


def _site_row(
    headline: HeadlineMetric, site: SiteId, metrics: ModelMetrics, shown_metrics: Sequence[str]
) -> list[TableCell]:
    cells = [
        headline.format_cell(metric, metrics.value(metric), headline.score_interval(metric, site))
        for metric in shown_metrics
    ]
    return [site, format_integer(metrics.n), *cells]


def _describe_results(record: RunRecord, headline: HeadlineMetric, sites: Mapping[SiteId, ModelMetrics]) -> list[str]:
    results = record.results
    if not results:
        return ["Scores of the last evaluated round; the run has not finished."]
    text = f"The model{'s' if headline.has_several_models else ''} of round {results.best_round}"
    text += f", {_describe_selection(results.selected_by, headline)}."
    if results.stop_reason != "finished":
        text += f" The run ended: {results.stop_reason}."
    ranking_metric = headline.site_ranking_metric(sites)
    values = metric_by_site(sites, ranking_metric).values()
    if len(values) > 1:
        text += f" Between sites, {headline.short_metric_title(ranking_metric)} has a standard deviation of {100 * pstdev(values):.1f} points."
    return [text, headline.interval_method_text] if headline.interval_method_text else [text]


def _describe_selection(chosen_by: str, headline: HeadlineMetric) -> str:
    """`val accuracy` -> selected by accuracy on validation data."""
    if chosen_by == "last round":
        return "the last round"
    split, _, metric = chosen_by.partition(" ")
    is_known = split in SPLIT_LABELS and metric in METRIC_LABELS
    return (
        f"selected by {headline.short_metric_title(metric)} on {SPLIT_LABELS[split]} data"
        if is_known
        else f"selected by {chosen_by}"
    )


def add_learning_curves_section(
    writer: ReportWriter, record: RunRecord, headline: HeadlineMetric, band: BandLevel
) -> None:
    split = record.most_evaluated_split()
    leading_metric = headline.metric if _metric_series(record, split, headline.metric) else "accuracy"
    series_by_metric = [(metric, _metric_series(record, split, metric)) for metric in (leading_metric, "loss")]
    if not any(series for _, series in series_by_metric):
        return
    writer.page.add_section("Learning curves")
    for metric, series in series_by_metric:
        if not series:
            continue
        has_band = any(curve.std_over_sites is not None for curve in series)
        caption = f"{headline.metric_title(metric)} on {SPLIT_LABELS[split]} data after every round; round 0 is the initial model."
        figure = figures.plot_curves(series, headline.metric_title(metric), band, percent=metric in PERCENT_METRICS)
        writer.add_figure(metric, figure, f"{caption} {BAND_DESCRIPTIONS[band]}" if has_band else caption)


def _metric_series(record: RunRecord, split: Split, metric: str) -> list[CurveSeries]:
    series = []
    if round_values := record.metric_by_round(split, "coordinator", metric):
        series.append(
            _point_series(
                f"{COORDINATOR_LABEL}, global model" if record.has_personalized_models else COORDINATOR_LABEL,
                round_values,
                PALETTE[0],
            )
        )
    if by_round := record.site_metric_by_round(split, metric):
        label = "Mean over sites, personalised models" if record.has_personalized_models else "Mean over sites"
        series.append(figures.mean_over_sites(label, by_round, PALETTE[1]))
    elif round_values := record.metric_by_round(split, "pooled", metric):
        series.append(_point_series(POOLED_LABEL, round_values, PALETTE[1]))
    return series


def _point_series(label: str, round_values: Sequence[tuple[int, float]], color: str) -> CurveSeries:
    return CurveSeries(
        label, [round_number for round_number, _ in round_values], [value for _, value in round_values], color=color
    )


# Figures of one model's scores: confusion matrix, ROC, precision-recall, reliability


@apply_figure_style()
def plot_confusion_matrix(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Rows are true classes, columns predicted ones. Numbers are counts; the colour is the fraction of the row."""
    import numpy as np
    from matplotlib.colors import to_rgb

    is_small = len(classes) <= MAX_HALF_WIDTH_CLASSES
    figure, axes = new_figure(HALF_WIDTH_INCHES if is_small else (FULL_WIDTH_INCHES[0], 1.6 + 0.32 * len(classes)))
    count_matrix = np.asarray(counts, dtype=float)
    row_share = count_matrix / np.maximum(count_matrix.sum(axis=1, keepdims=True), 1)
    cells = np.zeros((*count_matrix.shape, 4))
    cells[..., :3] = to_rgb(PALETTE[0])
    cells[..., 3] = 0.03 + 0.72 * row_share  # never opaque, so that text is readable on both themes
    axes.imshow(cells, aspect="auto", interpolation="none")
    for row, column in np.ndindex(*count_matrix.shape):
        count_text = f"{count_matrix[row, column]:,.0f}"
        cell_text = f"{count_text}\n{100 * row_share[row, column]:.0f} %" if is_small else count_text
        text_alpha = 1.0 if count_matrix[row, column] else 0.45
        axes.text(column, row, cell_text, ha="center", va="center", fontsize=9 if is_small else 8, alpha=text_alpha)
    names = [shorten_text(label, 16) for label in classes]
    is_crowded = max(map(len, names)) * len(names) > (48 if is_small else 90)
    rotation_style: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_crowded else {}
    axes.set_xticks(range(len(names)), names, parse_math=False, **rotation_style)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xlabel("Predicted")
    axes.set_ylabel("Truth")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


@apply_figure_style()
def plot_roc(
    curve: RocPoints,
    area: float | None = None,
    site_curves: Sequence[RocPoints] = (),
    operating_point: tuple[float, float] | None = None,
    point_text: str = "",
    curve_label: str = "all sites",
) -> Figure:
    """`site_curves`: of single sites, drawn thin in the background; `operating_point`: (fpr, tpr)."""
    figure, axes = new_unit_square("1 − specificity", "Sensitivity")
    axes.plot([0, 1], [0, 1], color=INK_COLOR, alpha=0.5, linewidth=1, linestyle=":")
    sites_label = "single sites" + (f" (the first {MAX_SITE_CURVES})" if len(site_curves) > MAX_SITE_CURVES else "")
    for index, site_curve in enumerate(site_curves[:MAX_SITE_CURVES]):
        x_values, y_values = thin_curve(site_curve.fpr, site_curve.tpr)
        axes.plot(x_values, y_values, color=INK_COLOR, alpha=0.28, linewidth=0.8, label=None if index else sites_label)
    axes.plot(curve.fpr, curve.tpr, color=PALETTE[0], linewidth=2.2, label=_label_with_area(curve_label, area))
    _mark_operating_point(axes, operating_point, point_text)
    axes.legend(loc="lower right")
    return figure


@apply_figure_style()
def plot_precision_recall(
    curve: PrPoints,
    area: float | None = None,
    prevalence: float | None = None,
    operating_point: tuple[float, float] | None = None,
    curve_label: str = "all sites",
) -> Figure:
    figure, axes = new_unit_square("Sensitivity (recall)", "Precision")
    if prevalence is not None:
        baseline_label = f"no skill: {100 * prevalence:.1f} % are positive"
        axes.axhline(prevalence, color=INK_COLOR, alpha=0.5, linewidth=1, linestyle=":", label=baseline_label)
    axes.plot(curve.recall, curve.precision, color=PALETTE[0], linewidth=2.2, label=_label_with_area(curve_label, area))
    _mark_operating_point(
        axes, operating_point, "" if operating_point is None else f"precision {100 * operating_point[1]:.0f} % there"
    )
    is_prevalence_high = prevalence is not None and prevalence > 0.45
    axes.legend(loc="lower left" if is_prevalence_high or area is None or area > 0.6 else "upper right")
    return figure


@apply_figure_style()
def plot_reliability(bins: Sequence[tuple[float, float, float]]) -> Figure:
    """`bins`: (confidence, accuracy, count) each; a dot with its 95 % interval, and the counts as bars below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=HALF_WIDTH_INCHES, layout="constrained")
    accuracy_axes, count_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
    filled_bins = [reliability_bin for reliability_bin in bins if reliability_bin[2] > 0]
    confidences, accuracies = (
        [reliability_bin[0] for reliability_bin in filled_bins],
        [reliability_bin[1] for reliability_bin in filled_bins],
    )
    accuracy_axes.scatter(confidences, accuracies, s=30, color=PALETTE[0], linewidths=0, zorder=3)
    accuracy_axes.plot([0, 1], [0, 1], color=INK_COLOR, alpha=0.5, linewidth=1, linestyle=":")
    for confidence, accuracy, count in filled_bins:
        accuracy_axes.plot(
            [confidence] * 2, wilson_interval(accuracy, count), color=PALETTE[0], alpha=0.45, linewidth=2.5
        )
    min_confidence = min((reliability_bin[0] for reliability_bin in filled_bins), default=0.0)
    accuracy_axes.set_xlim(max(-0.02, min_confidence - 0.08), 1.02)
    accuracy_axes.set_ylim(-0.03, 1.03)
    accuracy_axes.set_ylabel("Accuracy")
    count_axes.bar(
        confidences, [reliability_bin[2] for reliability_bin in filled_bins], 0.028, color=PALETTE[0], alpha=0.7
    )
    count_axes.set_ylabel("Examples")
    count_axes.set_xlabel("Confidence")
    count_axes.yaxis.set_major_formatter("{x:,.0f}")
    count_axes.locator_params(axis="y", nbins=2)
    return figure


def thin_curve(x_values: Sequence[float], y_values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MAX_CURVE_POINTS of a curve, its ends included, to limit the size of the page."""
    step = max(1, math.ceil((len(x_values) - 1) / (MAX_CURVE_POINTS - 1)))
    kept_indices = sorted({*range(0, len(x_values), step), len(x_values) - 1})
    return [x_values[index] for index in kept_indices], [y_values[index] for index in kept_indices]


def wilson_interval(proportion: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927)."""
    center = (proportion + z * z / (2 * count)) / (1 + z * z / count)
    half_width = (
        z / (1 + z * z / count) * math.sqrt(proportion * (1 - proportion) / count + z * z / (4 * count * count))
    )
    return center - half_width, center + half_width


def new_unit_square(x_label: str, y_label: str, size: tuple[float, float] = HALF_WIDTH_INCHES) -> tuple[Figure, Any]:
    figure, axes = new_figure(size)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_box_aspect(0.72)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _label_with_area(label: str, area: float | None) -> str:
    return label if area is None else f"{label}, area {area:.3f}"


def _mark_operating_point(axes: Any, point: tuple[float, float] | None, label: str) -> None:
    if point is not None:
        axes.plot(
            *point,
            marker="o",
            markersize=7,
            markeredgewidth=1.8,
            markeredgecolor=PALETTE[3],
            markerfacecolor="none",
            linestyle="",
            label=label,
            zorder=5,
        )
