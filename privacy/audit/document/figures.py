"""Figures of the audit report: budgets, spending round by round, and attacks compared with the promised bound."""

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
from pipeline.reports.run.curves import MAX_MARKED_ROUNDS, format_round_axis, label_rows
from privacy.audit.facts import SpendingFacts
from privacy.ledger.records import LedgerBudget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BARS = 60
SPENT_COLOR, LIMIT_COLOR, BUDGET_COLOR = PALETTE[0], PALETTE[3], PALETTE[8]


@apply_figure_style()
def plot_budgets(spending_by_site: Mapping[str, SpendingFacts]) -> Figure:
    """One bar per site: epsilon spent, and its budget, which every site has."""
    names = list(spending_by_site)[:MAX_BARS]
    figure, axes = new_figure((FULL_WIDTH_INCHES[0], 1.15 + 0.27 * len(names)))
    positions = range(len(names))
    limits = [budget.epsilon for name in names if (budget := spending_by_site[name].budget)]
    spent = [spending_by_site[name].spent for name in names]
    axes.barh(positions, limits, 0.62, color=BUDGET_COLOR, alpha=0.3, label="budget")
    axes.barh(positions, spent, 0.62, color=SPENT_COLOR, label="spent")
    for position, (epsilon, limit) in enumerate(zip(spent, limits, strict=True)):
        axes.annotate(
            f"{epsilon:.2f} of {limit:g}",
            (max(epsilon, limit), position),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, 1.14 * max(*limits, *spent))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("Epsilon")
    label_rows(axes, names)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@apply_figure_style()
def plot_spending(spending: SpendingFacts, budget: LedgerBudget) -> Figure:
    """Total epsilon spent after each round of this study, and the budget."""
    figure, axes = new_figure(HALF_WIDTH_INCHES)
    rounds = [0, *(point.round for point in spending.curve)]
    spent = [spending.spent_before, *(point.epsilon for point in spending.curve)]
    axes.step([*rounds, rounds[-1] + 0.5], [*spent, spent[-1]], where="post", color=SPENT_COLOR, label="total spent")
    if len(rounds) <= MAX_MARKED_ROUNDS:
        axes.plot(rounds[1:], spent[1:], "o", color=SPENT_COLOR, markersize=4)
    axes.axhline(budget.epsilon, color=LIMIT_COLOR, linestyle="--", linewidth=1.3, label="budget")
    axes.set_ylim(0, 1.12 * max(*spent, budget.epsilon))
    axes.set_ylabel("Epsilon")
    format_round_axis(axes)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@dataclass(frozen=True)
class AttackGauge:
    """An attack's result on the scale from chance to the promised bound."""

    name: str
    chance_level: float
    low: float
    measured: float
    high: float
    bound: float
    summary: str

    def to_scale(self, value: float) -> float:
        """0 at chance, 1 at the bound."""
        return (value - self.chance_level) / max(self.bound - self.chance_level, 1e-9)


@apply_figure_style()
def plot_attack_gauges(gauges: Sequence[AttackGauge]) -> Figure:
    figure, axes = new_figure((FULL_WIDTH_INCHES[0], 1.1 + 0.6 * len(gauges)))
    for position, gauge in enumerate(gauges):
        axes.plot([0, 1], [position, position], color=INK_COLOR, alpha=0.25, linewidth=1)
        axes.plot(
            [gauge.to_scale(gauge.low), gauge.to_scale(gauge.high)],
            [position, position],
            color=SPENT_COLOR,
            linewidth=4,
            alpha=0.45,
        )
        axes.plot(
            gauge.to_scale(gauge.measured),
            position,
            "o",
            color=SPENT_COLOR,
            markersize=6,
            label=None if position else "found by attack",
        )
        axes.plot(
            1, position, "|", color=LIMIT_COLOR, markersize=16, markeredgewidth=2, label=None if position else "bound"
        )
        axes.text(0.5, position - 0.2, gauge.summary, ha="center", va="bottom", fontsize=8)
    scaled_ends = [gauge.to_scale(value) for gauge in gauges for value in (gauge.low, gauge.high)]
    axes.set_xlim(min(0.0, *scaled_ends) - 0.03, max(1.0, *scaled_ends) + 0.03)
    axes.set_ylim(len(gauges) - 0.5, -0.75)
    axes.set_yticks(range(len(gauges)), [gauge.name for gauge in gauges])
    axes.set_xticks([0, 1], ["chance", "bound"])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
