"""The report section that compares the federated run with its baselines."""

from __future__ import annotations

from statistics import fmean

from pipeline.records.scores import EvaluatedAt
from pipeline.reports.document.formatting import PERCENT_METRICS, SPLIT_LABELS, format_points, format_score
from pipeline.reports.document.page import COORDINATOR_LABEL, POOLED_LABEL, ReportWriter, TableCell, TableColumn
from pipeline.reports.run import curves as figures
from pipeline.reports.run.baselines.figures import DotPlotRow, plot_baseline_dots, plot_roc_overlay
from pipeline.reports.run.baselines.results import ResultsByName, load_baseline_results, shared_metric
from pipeline.reports.run.baselines.text import TEST_SET_LABELS, baseline_findings
from pipeline.reports.run.curves import CurveSeries
from pipeline.reports.run.headline_metric import RANK_BASED_METRICS, HeadlineMetric
from pipeline.reports.run.record import RunRecord

MAX_DOT_PLOT_SITES = 16  # with more sites, the weakest
CURVE_TEST_SETS: tuple[EvaluatedAt, ...] = (
    "coordinator",
    "pooled",
)  # in the order in which baselines choose their curve


def add_baselines_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    results = load_baseline_results(record)
    if not results:
        return
    metric = shared_metric(results, headline)
    rows = _dot_plot_rows(results, metric)
    if not any(row.scores for row in rows):
        return
    writer.page.add_section("Comparison with baselines").add_findings(baseline_findings(results, headline, metric))
    num_hidden = len(results["federated"].scores_by_site(metric)) - sum(not row.is_overall for row in rows)
    writer.add_figure(
        "baselines",
        plot_baseline_dots(rows, results.values(), headline.metric_title(metric), metric in PERCENT_METRICS),
        _dot_plot_caption(rows, num_hidden),
    )
    _add_baselines_table(writer, results, headline, metric)
    has_roc_overlay = _add_roc_overlay(writer, results)
    _add_baseline_curves(writer, record, headline, results, wide=not has_roc_overlay)


def _dot_plot_rows(results: ResultsByName, metric: str) -> list[DotPlotRow]:
    """The overall row, then the sites by ascending federated score."""
    federated = results["federated"]
    overall_scores = {
        key: value for key, result in results.items() if (value := result.overall_score(metric)) is not None
    }
    label = POOLED_LABEL if federated.evaluated_at == "pooled" else COORDINATOR_LABEL
    overall_row = DotPlotRow(label, overall_scores, federated.score_interval(metric), is_overall=True)
    all_sites = dict.fromkeys(site for result in results.values() for site in result.scores_by_site(metric))
    federated_scores = federated.scores_by_site(metric)
    weakest = sorted(all_sites, key=lambda site: federated_scores.get(site, 2.0))[:MAX_DOT_PLOT_SITES]
    return [
        overall_row,
        *(
            DotPlotRow(site, _scores_at_site(results, metric, site), federated.score_interval(metric, site))
            for site in weakest
        ),
    ]


def _scores_at_site(results: ResultsByName, metric: str, site: str) -> dict[str, float]:
    return {name: values[site] for name, result in results.items() if site in (values := result.scores_by_site(metric))}


def _dot_plot_caption(rows: list[DotPlotRow], num_hidden: int) -> str:
    text = "Test data; further right is better. Sites are ordered by the federated score, the weakest on top"
    text += f"; the {num_hidden} strongest are not shown." if num_hidden > 0 else "."
    if any(row.interval for row in rows):
        text += " The pale bar is the federated score's interval."
    return text


def _add_baselines_table(writer: ReportWriter, results: ResultsByName, headline: HeadlineMetric, metric: str) -> None:
    has_overall_score = any(
        result.overall_score(metric) is not None for result in results.values() if result.name != "centralized"
    )
    central_score = (
        results["centralized"].overall_score(metric) if "centralized" in results and has_overall_score else None
    )
    shown_results = [
        result
        for result in results.values()
        if result.overall_score(metric) is not None or result.scores_by_site(metric)
    ]
    has_site_scores = any(result.scores_by_site(metric) for result in shown_results)
    rows: list[list[TableCell]] = []
    for result in shown_results:
        value, worst_site = result.overall_score(metric), result.worst_site(metric)
        row: list[TableCell] = [
            (result.style.label, result.style.description),
            headline.format_cell(metric, value, result.score_interval(metric)),
        ]
        if has_site_scores:
            lowest_text = (
                format_score(metric, result.scores_by_site(metric)[worst_site])
                if worst_site
                else format_score(metric, None)
            )
            row += [format_score(metric, result.mean_over_sites(metric)), (lowest_text, worst_site or "")]
        if central_score is not None:
            row.append(
                format_points(value - central_score) if value is not None and result.name != "centralized" else "–"
            )
        rows.append(row)
    columns = [
        TableColumn("Training"),
        TableColumn(POOLED_LABEL if results["federated"].evaluated_at == "pooled" else COORDINATOR_LABEL, True),
    ]
    columns += [TableColumn("Mean over sites", True), TableColumn("Weakest site", True)] if has_site_scores else []
    columns += [TableColumn("Gap to centralised, points", True)] if central_score is not None else []
    caption = f"{headline.metric_title(metric)} on test data; a point is 0.01."
    if metric in RANK_BASED_METRICS and any(result.has_several_models for result in shown_results):
        local_only_note = "Local-only training has one model per site, so it has no pooled value."
        caption += (
            " Runs with several models have no pooled value."
            if results["federated"].has_several_models
            else f" {local_only_note}"
        )
    writer.page.add_table(columns, rows, caption)


def _add_roc_overlay(writer: ReportWriter, results: ResultsByName) -> bool:
    results_with_roc = [result for result in results.values() if result.roc_curve]
    if len(results_with_roc) < 2:
        return False
    areas = {
        result.name: result.overall_score("positive_auroc") or result.overall_score("auroc")
        for result in results_with_roc
    }
    caption = f"ROC curves and their areas, {TEST_SET_LABELS[results_with_roc[0].evaluated_at]}."
    if "local_only" in results:
        caption += " Local-only models have no common curve."
    writer.add_figure("baseline_roc", plot_roc_overlay(results_with_roc, areas), caption)
    return True


def _add_baseline_curves(
    writer: ReportWriter, record: RunRecord, headline: HeadlineMetric, results: ResultsByName, wide: bool
) -> None:
    """Learning curves by the metric that the baselines recorded."""
    metric = next((result.curve_metric for result in results.values() if result.curve), "accuracy")
    split = record.most_evaluated_split()
    site_means = [
        (round_number, fmean(values)) for round_number, values in record.site_metric_by_round(split, metric).items()
    ]
    curve_test_sets: tuple[EvaluatedAt, ...] = (
        CURVE_TEST_SETS if not record.has_several_models else () if metric in RANK_BASED_METRICS else ("pooled",)
    )
    federated_curve = next(
        (
            round_values
            for evaluated_at in curve_test_sets
            if (round_values := record.metric_by_round(split, evaluated_at, metric))
        ),
        site_means,
    )
    curve_by_name = {result.name: result.curve for result in results.values()} | {"federated": federated_curve}
    series = [
        CurveSeries(
            result.style.label,
            [round_number for round_number, _ in curve_by_name[result.name]],
            [value for _, value in curve_by_name[result.name]],
            is_dashed=result.name != "federated",
            color=result.style.color,
        )
        for result in results.values()
        if curve_by_name[result.name]
    ]
    if len(series) < 2:
        return
    figure = figures.plot_curves(series, headline.metric_title(metric), percent=metric in PERCENT_METRICS, wide=wide)
    caption = f"{headline.metric_title(metric)} on {SPLIT_LABELS[split]} data by round."
    if metric in RANK_BASED_METRICS and curve_by_name.get("local_only"):
        caption += (
            " Where sites have different models: the mean over sites."
            if record.has_several_models
            else " Local only: the mean over sites."
        )
    writer.add_figure("baseline_curves", figure, caption)
