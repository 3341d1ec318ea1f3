"""The federation beside its yardsticks: a dot plot by site, and their ROC curves laid over each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.reports.document.figure_style import HALF, INK, WIDE, new_figure, styled
from pipeline.reports.document.formatting import shorten
from pipeline.reports.run.baselines.results import Contender
from pipeline.reports.run.scores import unit_square

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Span = tuple[float, float]


@dataclass(frozen=True)
class Row:
    label: str
    values: Mapping[str, float]  # contender -> score
    interval: Span | None = None  # the federation's
    whole: bool = False


@styled()
def dots(rows: Sequence[Row], every: Collection[Contender], title: str, percent: bool) -> Figure:
    """A line a row, a dot a contender; the federation's interval is a bar behind its dot."""
    figure, axes = new_figure((WIDE[0], 1.25 + 0.36 * len(rows)))
    scale = 100 if percent else 1
    for at, row in enumerate(rows):
        known = [scale * value for value in row.values.values()]
        if known:
            axes.plot([min(known), max(known)], [at, at], color=INK, alpha=0.2, linewidth=1, zorder=1)
        if row.interval:
            edges = [scale * edge for edge in row.interval]
            colour = next(one.look.colour for one in every if one.key == "federated")
            axes.plot(edges, [at, at], color=colour, alpha=0.28, linewidth=7, solid_capstyle="butt", zorder=2)
    for one in every:
        places = [(scale * row.values[one.key], at) for at, row in enumerate(rows) if one.key in row.values]
        if places:
            ours = one.key == "federated"
            axes.scatter(
                [x for x, _ in places], [y for _, y in places],
                s=62 if ours else 44, marker=one.look.marker, color=one.look.colour, linewidths=0,
                label=one.look.label, zorder=4 if ours else 3,
            )  # fmt: skip
    wholes = sum(row.whole for row in rows)
    if 0 < wholes < len(rows):
        axes.axhline(wholes - 0.5, color=INK, alpha=0.35, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [shorten(row.label, 30) for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"{title}, %" if percent else title, parse_math=False)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


@styled()
def roc_overlay(every: Sequence[Contender], areas: Mapping[str, float | None]) -> Figure:
    figure, axes = unit_square("1 − specificity", "Sensitivity", HALF)
    axes.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    for one in every:
        curve = one.roc
        if curve is None:
            continue
        area = areas.get(one.key)
        ours = one.key == "federated"
        axes.plot(
            curve["fpr"], curve["tpr"], color=one.look.colour, zorder=4 if ours else 3,
            linewidth=2.2 if ours else 1.3, linestyle="-" if ours else {"central": "--"}.get(one.key, "-."),
            label=shorten(one.look.label, 30) + (f"  {area:.3f}" if area is not None else ""),
        )  # fmt: skip
    axes.legend(loc="lower right", fontsize=8)
    return figure
