"""The section of a run's report about sites that have models of their own: what these gain over the common one, and over none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.reports.document.figure_style import (
    FULL_WIDTH_INCHES,
    HALF_WIDTH_INCHES,
    INK_COLOR,
    PALETTE,
    apply_figure_style,
    new_figure,
)
from pipeline.reports.document.formatting import (
    PERCENT_METRICS,
    SPLIT_LABELS,
    UNDEFINED_TEXT,
    format_integer,
    format_points,
    format_score,
    shorten_text,
)
from pipeline.reports.document.page import ReportWriter, TableCell, TableColumn
from pipeline.reports.run.baselines.text import (
    NEGLIGIBLE_GAIN,
    are_gains_negligible,
    describe_gains,
    describe_negligible_gains,
    gains_by_site,
)
from pipeline.reports.run.headline_metric import HeadlineMetric, find_interval
from pipeline.reports.run.record import JsonObject, RunRecord, comparison_scores, finite_or_none, metric_by_site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DUMBBELL_SITES = 30  # sites, a line each; more become dots
BEST_MARK = "★"
ScoreBySite = Mapping[str, float]


def add_personalization_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    split, scores = record.latest_scores()
    personalized_metrics: JsonObject = scores.get("sites") or {}
    metric = headline.site_ranking_metric(personalized_metrics)
    personalized_scores, global_scores = (
        metric_by_site(personalized_metrics, metric),
        metric_by_site(comparison_scores(scores, "global").get("sites") or {}, metric),
    )
    gains = gains_by_site(personalized_scores, global_scores)
    if not gains:
        return
    local_only_scores = _local_only_scores(record, metric)
    writer.page.add_section("Own models and the common one").add_findings(
        _personalization_findings(personalized_scores, global_scores, local_only_scores, metric)
    )
    rows = [
        PersonalizationScores(site, global_scores[site], personalized_scores[site], local_only_scores.get(site))
        for site in gains
    ]
    _add_personalization_figures(writer, rows, headline.metric_title(metric), metric in PERCENT_METRICS)
    _add_personalization_table(writer, rows, personalized_metrics, headline, metric, split)


def _local_only_scores(record: RunRecord, metric: str) -> dict[str, float]:
    baselines: JsonObject = (record.results or {}).get("baselines") or {}
    test_scores: JsonObject = (baselines.get("local_only") or {}).get("test") or {}
    return metric_by_site(test_scores.get("sites") or {}, metric)


def _personalization_findings(
    personalized_scores: ScoreBySite, global_scores: ScoreBySite, local_only_scores: ScoreBySite, metric: str
) -> list[str]:
    findings = [
        f"Against {reference_name}, a site's own model {_describe_comparison(gains)}."
        for reference_name, reference_scores in (
            ("the common model", global_scores),
            ("training alone", local_only_scores),
        )
        if (gains := gains_by_site(personalized_scores, reference_scores))
    ]
    weakest = min(personalized_scores, key=lambda site: personalized_scores[site])
    other_scores = [
        f"{format_score(metric, reference_scores[weakest])} {text}"
        for reference_scores, text in ((global_scores, "with the common model"), (local_only_scores, "alone"))
        if weakest in reference_scores
    ]
    findings.append(
        f"The weakest site is {weakest}: {format_score(metric, personalized_scores[weakest])} with its own; {', '.join(other_scores)}."
    )
    caution = "One training run each; another seed would move the scores. Differences at single sites are not tested."
    return [*findings, caution]


def _describe_comparison(gains: ScoreBySite) -> str:
    return (
        f"does about the same {describe_negligible_gains(gains)}"
        if are_gains_negligible(gains)
        else describe_gains(gains)
    )


def _add_personalization_figures(
    writer: ReportWriter, rows: Sequence[PersonalizationScores], title: str, percent: bool
) -> None:
    if len(rows) <= MAX_DUMBBELL_SITES:
        ordered_rows = sorted(rows, key=lambda row: -row.gain)
        caption = "From the common model to the site's own; further right is better. The largest gain is on top."
        if any(row.local_only is not None for row in rows):
            caption += " The tick is what the site reaches alone."
        writer.add_figure("personal", plot_dumbbells(ordered_rows, title, percent), caption)
        return
    personalized_scores = {row.site: row.personalized_model for row in rows}
    local_only_scores = {row.site: row.local_only for row in rows if row.local_only is not None}
    for key, reference_scores, reference_name in (
        ("personal", {row.site: row.global_model for row in rows}, "common model"),
        ("personal_alone", local_only_scores, "alone"),
    ):
        if reference_scores:
            caption = f"A mark a site: its own model against {'training alone' if reference_scores is local_only_scores else 'the common model'}. Above the line, its own is better."
            writer.add_figure(
                key, plot_model_scatter(reference_scores, personalized_scores, reference_name, title, percent), caption
            )


def _add_personalization_table(
    writer: ReportWriter,
    rows: Sequence[PersonalizationScores],
    personalized_metrics: JsonObject,
    headline: HeadlineMetric,
    metric: str,
    split: str,
) -> None:
    has_local_only = any(row.local_only is not None for row in rows)
    cells = [_personalization_row(row, personalized_metrics, headline, metric, has_local_only) for row in rows]
    columns = [
        TableColumn("Site"),
        TableColumn("Examples", True),
        TableColumn("Common model", True),
        TableColumn("Own model", True),
    ]
    columns += [TableColumn("Alone", True)] if has_local_only else []
    columns += [TableColumn("Own − common, points", True)] + (
        [TableColumn("Own − alone, points", True)] if has_local_only else []
    )
    caption = f"{headline.metric_title(metric)} on {SPLIT_LABELS[split]} data, site by site. {BEST_MARK} marks the best of a row."
    if any(find_interval(headline.global_model_intervals, metric, row.site) for row in rows):
        caption += f" In brackets, {headline.confidence_level} intervals of the common model."
    writer.page.add_table(columns, cells, caption)


def _personalization_row(
    row: PersonalizationScores,
    personalized_metrics: JsonObject,
    headline: HeadlineMetric,
    metric: str,
    has_local_only: bool,
) -> list[TableCell]:
    values = [row.global_model, row.personalized_model, *([row.local_only] if has_local_only else [])]
    score_texts = [format_score(metric, value) for value in values]
    best_text = format_score(metric, max(value for value in values if value is not None))
    marked_texts = [
        f"{BEST_MARK} {text}" if text == best_text and len(set(score_texts)) > 1 else text for text in score_texts
    ]
    interval = find_interval(headline.global_model_intervals, metric, row.site)
    global_cell = headline.format_cell(metric, row.global_model, interval)
    cells: list[TableCell] = [
        marked_texts[0] if isinstance(global_cell, str) else (marked_texts[0], global_cell[1]),
        *marked_texts[1:],
    ]
    differences = [format_points(row.gain)]
    if has_local_only:
        differences.append(
            UNDEFINED_TEXT if row.local_only is None else format_points(row.personalized_model - row.local_only)
        )
    return [
        row.site,
        format_integer(finite_or_none((personalized_metrics.get(row.site) or {}).get("n"))),
        *cells,
        *differences,
    ]


# A site's own model beside the common one: a line a site, or, of many sites, a dot each against the diagonal.

PERSONALIZED_COLOR, GLOBAL_COLOR, WORSE_COLOR, LOCAL_ONLY_COLOR = PALETTE[0], PALETTE[1], PALETTE[3], INK_COLOR


@dataclass(frozen=True)
class PersonalizationScores:
    """One site's scores; None where unknown."""

    site: str
    global_model: float
    personalized_model: float
    local_only: float | None = None

    @property
    def gain(self) -> float:
        return self.personalized_model - self.global_model


@apply_figure_style()
def plot_dumbbells(rows: Sequence[PersonalizationScores], title: str, percent: bool) -> Figure:
    """From the common model, a ring, to the site's own, a dot; a tick where it would be alone."""
    from matplotlib.lines import Line2D

    figure, axes = new_figure((FULL_WIDTH_INCHES[0], 1.25 + 0.3 * len(rows)))
    scale = 100 if percent else 1
    for index, row in enumerate(rows):
        color = WORSE_COLOR if row.gain <= -NEGLIGIBLE_GAIN else PERSONALIZED_COLOR
        axes.plot(
            [scale * row.global_model, scale * row.personalized_model],
            [index, index],
            color=color,
            alpha=0.55,
            linewidth=2.6,
            zorder=1,
        )
    local_only_points = [
        (scale * row.local_only, index) for index, row in enumerate(rows) if row.local_only is not None
    ]
    positions = range(len(rows))
    axes.scatter(
        [scale * row.global_model for row in rows],
        positions,
        s=46,
        marker="o",
        facecolors="none",
        edgecolors=GLOBAL_COLOR,
        linewidths=1.8,
        zorder=3,
    )
    axes.scatter(
        [scale * row.personalized_model for row in rows],
        positions,
        s=46,
        marker="o",
        color=PERSONALIZED_COLOR,
        linewidths=0,
        zorder=2,
    )
    axes.scatter(
        [x for x, _ in local_only_points],
        [y for _, y in local_only_points],
        s=150,
        marker="|",
        color=LOCAL_ONLY_COLOR,
        linewidths=1.8,
        zorder=4,
    )
    axes.set_yticks(positions, [shorten_text(row.site, 30) for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"{title}, %" if percent else title, parse_math=False)
    all_handles = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            markersize=7,
            markerfacecolor="none",
            markeredgewidth=1.8,
            markeredgecolor=GLOBAL_COLOR,
            label="common model",
        ),
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            markersize=7,
            markeredgewidth=0,
            color=PERSONALIZED_COLOR,
            label="own model",
        ),
        Line2D(
            [], [], marker="|", linestyle="", markersize=12, markeredgewidth=1.8, color=LOCAL_ONLY_COLOR, label="alone"
        ),
        Line2D([], [], color=WORSE_COLOR, alpha=0.55, linewidth=2.6, label="own is worse"),
    ]
    handle_present = [True, True, bool(local_only_points), any(row.gain <= -NEGLIGIBLE_GAIN for row in rows)]
    handles = [handle for handle, is_present in zip(all_handles, handle_present, strict=True) if is_present]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


@apply_figure_style()
def plot_model_scatter(
    reference_scores: Mapping[str, float],
    personalized_scores: Mapping[str, float],
    reference_name: str,
    title: str,
    percent: bool,
) -> Figure:
    """Across, their scores; upward, those of the sites' own models: above the line, the own one is better."""
    figure, axes = new_figure(HALF_WIDTH_INCHES)
    scale = 100 if percent else 1
    gains = gains_by_site(personalized_scores, reference_scores)
    outcome_styles = (
        ("own is better", PERSONALIZED_COLOR, "^"),
        ("about the same", PALETTE[8], "o"),
        ("own is worse", WORSE_COLOR, "v"),
    )
    for index, (label, color, marker) in enumerate(outcome_styles):
        sites = [site for site, gain in gains.items() if _gain_category(gain) == index]
        if sites:
            x_values, y_values = (
                [scale * scores[site] for site in sites] for scores in (reference_scores, personalized_scores)
            )
            legend_text = f"{label} ({len(sites):,})"
            axes.scatter(
                x_values, y_values, s=26, marker=marker, color=color, alpha=0.75, linewidths=0, label=legend_text
            )
    all_values = [scale * scores[site] for site in gains for scores in (reference_scores, personalized_scores)]
    low, high = min(all_values), max(all_values)
    padding = 0.06 * (high - low) or 0.01 * scale
    axes.plot(
        [low - padding, high + padding],
        [low - padding, high + padding],
        color=INK_COLOR,
        alpha=0.5,
        linewidth=1,
        linestyle=":",
    )
    axes.set_xlim(low - padding, high + padding)
    axes.set_ylim(low - padding, high + padding)
    axes.set_box_aspect(0.72)
    unit = ", %" if percent else ""
    axes.set_xlabel(f"{title}{unit}: {reference_name}", parse_math=False)
    axes.set_ylabel(f"{title}{unit}: own model", parse_math=False)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _gain_category(gain: float) -> int:
    return 0 if gain >= NEGLIGIBLE_GAIN else 2 if gain <= -NEGLIGIBLE_GAIN else 1
