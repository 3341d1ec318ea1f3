"""What an audit draws: budgets, how they were spent round by round, and attacks beside the bound."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.reports.document.figure_style import HALF, INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.run.curves import FEW_ROUNDS, name_rows, round_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
DPI = 200
MOST_BARS = 60
SPENT, LIMIT, OTHER = PALETTE[0], PALETTE[3], PALETTE[8]


@styled()
def budgets(sites: Mapping[str, Json]) -> Figure:
    """A bar a site: what was spent, of its budget."""
    names = list(sites)[:MOST_BARS]
    figure, axes = new_figure((WIDE[0], 1.15 + 0.27 * len(names)))
    places = range(len(names))
    limits = [float(sites[name]["budget"]["epsilon"]) for name in names]
    spent = [float(sites[name]["spent"]) for name in names]
    axes.barh(places, limits, 0.62, color=OTHER, alpha=0.3, label="budget")
    axes.barh(places, spent, 0.62, color=SPENT, label="spent")
    for place, (used, limit) in enumerate(zip(spent, limits, strict=True)):
        axes.annotate(
            f"{used:.2f} of {limit:g}",
            (max(used, limit), place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, 1.14 * max(*limits, *spent))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("Epsilon")
    name_rows(axes, names)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@styled()
def spending(site: Json) -> Figure:
    """Epsilon spent in all after each round of this study, and the budget."""
    figure, axes = new_figure(HALF)
    turns = [0, *(point["turn"] for point in site["curve"])]
    spent = [site["before"], *(point["epsilon"] for point in site["curve"])]
    axes.step([*turns, turns[-1] + 0.5], [*spent, spent[-1]], where="post", color=SPENT, label="spent in all")
    if len(turns) <= FEW_ROUNDS:
        axes.plot(turns[1:], spent[1:], "o", color=SPENT, markersize=4)
    axes.axhline(float(site["budget"]["epsilon"]), color=LIMIT, linestyle="--", linewidth=1.3, label="budget")
    axes.set_ylim(0, 1.12 * max(*spent, float(site["budget"]["epsilon"])))
    axes.set_ylabel("Epsilon")
    round_axis(axes)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


@dataclass(frozen=True)
class Gauge:
    """An attack's result on the scale from chance to what the promise allows."""

    name: str
    chance: float
    low: float
    found: float
    high: float
    bound: float
    words: str

    def at(self, value: float) -> float:
        return (value - self.chance) / max(self.bound - self.chance, 1e-9)


@styled()
def beside_bound(gauges: Sequence[Gauge]) -> Figure:
    figure, axes = new_figure((WIDE[0], 1.1 + 0.6 * len(gauges)))
    for place, one in enumerate(gauges):
        axes.plot([0, 1], [place, place], color=INK, alpha=0.25, linewidth=1)
        axes.plot([one.at(one.low), one.at(one.high)], [place, place], color=SPENT, linewidth=4, alpha=0.45)
        axes.plot(one.at(one.found), place, "o", color=SPENT, markersize=6, label=None if place else "found by attack")
        axes.plot(1, place, "|", color=LIMIT, markersize=16, markeredgewidth=2, label=None if place else "bound")
        axes.text(0.5, place - 0.2, one.words, ha="center", va="bottom", fontsize=8)
    ends = [one.at(value) for one in gauges for value in (one.low, one.high)]
    axes.set_xlim(min(0.0, *ends) - 0.03, max(1.0, *ends) + 0.03)
    axes.set_ylim(len(gauges) - 0.5, -0.75)
    axes.set_yticks(range(len(gauges)), [one.name for one in gauges])
    axes.set_xticks([0, 1], ["chance", "bound"])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def png_of(figure: Figure) -> bytes:
    """For paper."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
