"""The report section on personalised models: gains of each site over the global model and over local-only training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Split
from pipeline.records.scores import ModelMetrics, metric_by_site
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
from pipeline.reports.run.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DUMBBELL_SITES = 30  # with more sites, a scatter plot
BEST_MARK = "★"
PERSONALIZED_COLOR, GLOBAL_COLOR, WORSE_COLOR, LOCAL_ONLY_COLOR = PALETTE[0], PALETTE[1], PALETTE[3], INK_COLOR
ScoreBySite = Mapping[str, float]


@dataclass(frozen=True)
class PersonalizationScores:
    """One site's scores by model; None if unknown."""

    site: str
    global_model: float
    personalized_model: float
    local_only: float | None = None

    @property
    def gain(self) -> float:
        return self.personalized_model - self.global_model


def add_personalization_section(writer: ReportWriter, record: RunRecord, headline: HeadlineMetric) -> None:
    split, scores = record.latest_scores()
    personalized_metrics = scores.sites
    metric = headline.site_ranking_metric(personalized_metrics)
    personalized_scores = metric_by_site(personalized_metrics, metric)
    global_scores = metric_by_site(scores.comparison("global").sites, metric)
    gains = gains_by_site(personalized_scores, global_scores)
    if not gains:
        return
    local_only_scores = _local_only_scores(record, metric)
    writer.page.add_section("Personalised and global models").add_findings(
        _personalization_findings(personalized_scores, global_scores, local_only_scores, metric)
    )
    rows = [
        PersonalizationScores(site, global_scores[site], personalized_scores[site], local_only_scores.get(site))
        for site in gains
    ]
    _add_personalization_figures(writer, rows, headline.metric_title(metric), metric in PERCENT_METRICS)
    _add_personalization_table(writer, rows, personalized_metrics, headline, metric, split)


def _local_only_scores(record: RunRecord, metric: str) -> dict[str, float]:
    local_only = record.results.baselines.get("local_only") if record.results else None
    return metric_by_site(local_only.test.sites, metric) if local_only else {}


def _personalization_findings(
    personalized_scores: ScoreBySite, global_scores: ScoreBySite, local_only_scores: ScoreBySite, metric: str
) -> list[str]:
    findings = [
        f"Compared with {reference_name}, a site's personalised model {_describe_comparison(gains)}."
        for reference_name, reference_scores in (
            ("the global model", global_scores),
            ("local-only training", local_only_scores),
        )
        if (gains := gains_by_site(personalized_scores, reference_scores))
    ]
    weakest = min(personalized_scores, key=lambda site: personalized_scores[site])
    other_scores = [
        f"{format_score(metric, reference_scores[weakest])} {text}"
        for reference_scores, text in (
            (global_scores, "with the global model"),
            (local_only_scores, "with local-only training"),
        )
        if weakest in reference_scores
    ]
    findings.append(
        f"The weakest site is {weakest}: {format_score(metric, personalized_scores[weakest])} with its personalised model; {', '.join(other_scores)}."
    )
    caution = (
        "Each score is from one training run and varies with the seed. Differences at single sites are not tested."
    )
    return [*findings, caution]


def _describe_comparison(gains: ScoreBySite) -> str:
    return (
        f"scores about the same {describe_negligible_gains(gains)}"
        if are_gains_negligible(gains)
        else describe_gains(gains)
    )


def _add_personalization_figures(
    writer: ReportWriter, rows: Sequence[PersonalizationScores], title: str, percent: bool
) -> None:
    if len(rows) <= MAX_DUMBBELL_SITES:
        ordered_rows = sorted(rows, key=lambda row: -row.gain)
        caption = "From the global model to the site's personalised model; further right is better. The largest gain is on top."
        if any(row.local_only is not None for row in rows):
            caption += " The tick is local-only training."
        writer.add_figure("personalized", plot_dumbbells(ordered_rows, title, percent), caption)
        return
    personalized_scores = {row.site: row.personalized_model for row in rows}
    local_only_scores = {row.site: row.local_only for row in rows if row.local_only is not None}
    for key, reference_scores, reference_name in (
        ("personalized", {row.site: row.global_model for row in rows}, "global model"),
        ("personalized_local_only", local_only_scores, "local only"),
    ):
        if reference_scores:
            caption = f"One mark per site: its personalised model against {'local-only training' if reference_scores is local_only_scores else 'the global model'}. Above the line, the personalised model is better."
            writer.add_figure(
                key, plot_model_scatter(reference_scores, personalized_scores, reference_name, title, percent), caption
            )


def _add_personalization_table(
    writer: ReportWriter,
    rows: Sequence[PersonalizationScores],
    personalized_metrics: Mapping[SiteId, ModelMetrics],
    headline: HeadlineMetric,
    metric: str,
    split: Split,
) -> None:
    has_local_only = any(row.local_only is not None for row in rows)
    cells = [_personalization_row(row, personalized_metrics, headline, metric, has_local_only) for row in rows]
    columns = [
        TableColumn("Site"),
        TableColumn("Examples", True),
        TableColumn("Global model", True),
        TableColumn("Personalised model", True),
    ]
    columns += [TableColumn("Local only", True)] if has_local_only else []
    columns += [TableColumn("Personalised − global, points", True)] + (
        [TableColumn("Personalised − local only, points", True)] if has_local_only else []
    )
    caption = f"{headline.metric_title(metric)} on {SPLIT_LABELS[split]} data, site by site. {BEST_MARK} marks the best of a row."
    if any(find_interval(headline.global_model_intervals, metric, row.site) for row in rows):
        caption += f" In brackets, {headline.confidence_level} intervals of the global model."
    writer.page.add_table(columns, cells, caption)


def _personalization_row(
    row: PersonalizationScores,
    personalized_metrics: Mapping[SiteId, ModelMetrics],
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
        format_integer(personalized_metrics[row.site].n),
        *cells,
        *differences,
    ]


# Figures


@apply_figure_style()
def plot_dumbbells(rows: Sequence[PersonalizationScores], title: str, percent: bool) -> Figure:
    """One line per site, from the global model (ring) to the personalised one (dot); a tick at local-only training."""
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
            label="global model",
        ),
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            markersize=7,
            markeredgewidth=0,
            color=PERSONALIZED_COLOR,
            label="personalised model",
        ),
        Line2D(
            [],
            [],
            marker="|",
            linestyle="",
            markersize=12,
            markeredgewidth=1.8,
            color=LOCAL_ONLY_COLOR,
            label="local only",
        ),
        Line2D([], [], color=WORSE_COLOR, alpha=0.55, linewidth=2.6, label="personalised is worse"),
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
    """x: score of the reference model; y: score of the site's personalised model. One mark per site."""
    figure, axes = new_figure(HALF_WIDTH_INCHES)
    scale = 100 if percent else 1
    gains = gains_by_site(personalized_scores, reference_scores)
    outcome_styles = (
        ("personalised is better", PERSONALIZED_COLOR, "^"),
        ("about the same", PALETTE[8], "o"),
        ("personalised is worse", WORSE_COLOR, "v"),
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
    axes.set_ylabel(f"{title}{unit}: personalised model", parse_math=False)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _gain_category(gain: float) -> int:
    return 0 if gain >= NEGLIGIBLE_GAIN else 2 if gain <= -NEGLIGIBLE_GAIN else 1
