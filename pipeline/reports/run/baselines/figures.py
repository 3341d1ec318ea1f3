"""Figures that compare the federated run with its baselines: a dot plot by site and overlaid ROC curves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.records.run_results import Interval
from pipeline.reports.document.figure_style import (
    FULL_WIDTH_INCHES,
    HALF_WIDTH_INCHES,
    INK_COLOR,
    apply_figure_style,
    new_figure,
)
from pipeline.reports.document.formatting import shorten_text
from pipeline.reports.run.baselines.results import BaselineResult
from pipeline.reports.run.scores import new_unit_square

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class DotPlotRow:
    label: str
    scores: Mapping[str, float]  # result name -> score
    interval: Interval | None = None  # the federated run's
    is_overall: bool = False


@apply_figure_style()
def plot_baseline_dots(
    rows: Sequence[DotPlotRow], results: Collection[BaselineResult], title: str, percent: bool
) -> Figure:
    """One line per row, one dot per result; the federated run's interval is a bar behind its dot."""
    figure, axes = new_figure((FULL_WIDTH_INCHES[0], 1.25 + 0.36 * len(rows)))
    scale = 100 if percent else 1
    for index, row in enumerate(rows):
        values = [scale * value for value in row.scores.values()]
        if values:
            axes.plot([min(values), max(values)], [index, index], color=INK_COLOR, alpha=0.2, linewidth=1, zorder=1)
        if row.interval:
            edges = [scale * edge for edge in row.interval]
            color = next(result.style.color for result in results if result.name == "federated")
            axes.plot(edges, [index, index], color=color, alpha=0.28, linewidth=7, solid_capstyle="butt", zorder=2)
    for result in results:
        positions = [
            (scale * row.scores[result.name], index) for index, row in enumerate(rows) if result.name in row.scores
        ]
        if positions:
            is_federated = result.name == "federated"
            axes.scatter(
                [x for x, _ in positions],
                [y for _, y in positions],
                s=62 if is_federated else 44,
                marker=result.style.marker,
                color=result.style.color,
                linewidths=0,
                label=result.style.label,
                zorder=4 if is_federated else 3,
            )
    num_overall_rows = sum(row.is_overall for row in rows)
    if 0 < num_overall_rows < len(rows):
        axes.axhline(num_overall_rows - 0.5, color=INK_COLOR, alpha=0.35, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [shorten_text(row.label, 30) for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"{title}, %" if percent else title, parse_math=False)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


@apply_figure_style()
def plot_roc_overlay(results: Sequence[BaselineResult], areas: Mapping[str, float | None]) -> Figure:
    figure, axes = new_unit_square("1 − specificity", "Sensitivity", HALF_WIDTH_INCHES)
    axes.plot([0, 1], [0, 1], color=INK_COLOR, alpha=0.5, linewidth=1, linestyle=":")
    for result in results:
        curve = result.roc_curve
        if curve is None:
            continue
        area = areas.get(result.name)
        is_federated = result.name == "federated"
        axes.plot(
            curve.fpr,
            curve.tpr,
            color=result.style.color,
            zorder=4 if is_federated else 3,
            linewidth=2.2 if is_federated else 1.3,
            linestyle="-" if is_federated else {"centralized": "--"}.get(result.name, "-."),
            label=shorten_text(result.style.label, 30) + (f"  {area:.3f}" if area is not None else ""),
        )
    axes.legend(loc="lower right", fontsize=8)
    return figure
