"""What a report draws about sites and rounds; every function returns a matplotlib Figure. Scores are in score_figures.py."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from pipeline.reports.document.figure_style import HALF, INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.document.formatting import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Band = Literal["68", "95"]
BAND_WIDTH: Mapping[Band, float] = {"68": 1.0, "95": 1.96}  # standard deviations each side of the mean
FEW_SITES = 6  # as many as a half-width figure names
FEW_BANDS = 4  # as many as can lie over each other
FEW_ROUNDS = 30  # up to here each round gets a dot
COLUMNS = 120  # of the heat strip; more rounds share a column


@dataclass(frozen=True)
class Series:
    label: str
    rounds: Sequence[int]
    values: Sequence[float]
    deviation: Sequence[float] | None = None  # over sites, a round each
    dashed: bool = False
    colour: str | None = None  # else by its place


def over_sites(label: str, by_round: Mapping[int, Sequence[float]], colour: str | None = None) -> Series:
    """Mean and (population) standard deviation over the sites of every round."""
    rounds = sorted(by_round)
    means = [fmean(by_round[turn]) for turn in rounds]
    return Series(label, rounds, means, [pstdev(by_round[turn]) for turn in rounds], colour=colour)


def band_edges(series: Series, band: Band) -> tuple[list[float], list[float]]:
    width = BAND_WIDTH[band]
    spread = [width * deviation for deviation in series.deviation or [0.0] * len(series.values)]
    pairs = list(zip(series.values, spread, strict=True))
    return [value - by for value, by in pairs], [value + by for value, by in pairs]


@styled()
def curves(
    series: Sequence[Series],
    title: str,
    band: Band = "68",
    percent: bool = False,
    wide: bool = False,
    limits: tuple[float, float] | None = None,
) -> Figure:
    figure, axes = new_figure(WIDE if wide else HALF)
    for place, one in enumerate(series):
        colour = one.colour or PALETTE[place % len(PALETTE)]
        scale = 100 if percent else 1
        axes.plot(
            one.rounds,
            [scale * value for value in one.values],
            color=colour,
            label=shorten(one.label, 40),
            linestyle="--" if one.dashed else "-",
            linewidth=1.0 if len(one.rounds) > 10 * FEW_ROUNDS else 1.3 if one.dashed else 1.8,
            marker="o" if len(one.rounds) <= FEW_ROUNDS and not one.dashed else None,
            markersize=3,
        )
        if one.deviation is not None:
            low, high = ([scale * value for value in edge] for edge in band_edges(one, band))
            if len(series) <= FEW_BANDS:
                axes.fill_between(one.rounds, low, high, color=colour, alpha=0.18, linewidth=0)
            else:  # so many filled bands would hide each other, so only their edges are drawn
                axes.plot(one.rounds, low, one.rounds, high, color=colour, alpha=0.35, linewidth=0.5)
    if percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -1), min(high, 101))
    if limits is not None:
        axes.set_ylim(limits)
    axes.set_ylabel(f"{title}, %" if percent else title)
    round_axis(axes)
    if series:
        figure.legend(loc="outside lower center", ncols=legend_columns([one.label for one in series], wide))
    return figure


@styled()
def class_counts(classes: Sequence[str], counts: Mapping[str, Sequence[int]]) -> Figure:
    """Stacked bars, one a site."""
    wide = len(counts) > FEW_SITES
    figure, axes = new_figure(WIDE if wide else HALF)
    base = [0] * len(counts)
    for place, label in enumerate(classes):
        heights = [site[place] for site in counts.values()]
        axes.bar(
            range(len(counts)), heights, 0.8, bottom=base, color=PALETTE[place % len(PALETTE)], label=shorten(label)
        )
        base = [lower + height for lower, height in zip(base, heights, strict=True)]
    axes.set_ylabel("Examples")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="x", visible=False)
    _name_bars(axes, list(counts))
    if classes:
        figure.legend(loc="outside lower center", ncols=legend_columns(classes, wide))
    return figure


@styled()
def stragglers(
    sites: Sequence[str],
    rounds: Sequence[int],
    share: Sequence[Sequence[float | None]],
    missed: Collection[tuple[int, int]],
) -> Figure:
    """share[site][round] = steps done / asked (None: not asked); missed = (site, round) places that did not count."""
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    figure, axes = new_figure((WIDE[0], 1.5 + 0.22 * min(len(sites), 60)))
    per_column = max(1, math.ceil(len(rounds) / COLUMNS))
    columns = [range(at, min(at + per_column, len(rounds))) for at in range(0, len(rounds), per_column)]
    cells = np.zeros((len(sites), len(columns), 4))  # transparent: not asked
    for row in range(len(sites)):
        for column, turns in enumerate(columns):
            if any((row, turn) in missed for turn in turns):
                lost = sum((row, turn) in missed for turn in turns) / len(turns)
                cells[row, column] = (*to_rgb(PALETTE[3]), 0.35 + 0.5 * lost)
            elif done := [value for turn in turns if (value := share[row][turn]) is not None]:
                cells[row, column] = (*to_rgb(PALETTE[0]), 0.08 + 0.77 * min(fmean(done), 1.0))
    last = columns[-1].stop if columns else 1
    edges = (-0.5, last - 0.5, len(sites) - 0.5, -0.5)
    axes.imshow(cells, aspect="auto", interpolation="none", extent=edges)
    if per_column == 1 and len(rounds) <= 2 * FEW_ROUNDS and missed:
        rows, turns_missed = zip(*sorted(missed), strict=True)
        axes.scatter(turns_missed, rows, marker="x", s=14, linewidths=1, color=INK)
    axes.grid(visible=False)
    name_rows(axes, sites)
    round_axis(axes, rounds)
    legend = [
        Line2D(
            [], [], marker="s", linestyle="", markersize=8, markeredgewidth=0, color=colour, alpha=alpha, label=label
        )
        for colour, alpha, label in (
            (PALETTE[0], 0.85, "all steps done"),
            (PALETTE[0], 0.4, "some steps done"),
            (PALETTE[3], 0.7, "missed: did not count"),
        )
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3)
    return figure


@styled()
def traffic(rounds: Sequence[int], up: Sequence[int], down: Sequence[int]) -> Figure:
    """Megabytes so far."""
    figure, axes = new_figure()
    for label, each, colour in (("up, sites to coordinator", up, PALETTE[0]), ("down", down, PALETTE[1])):
        total, so_far = 0, []
        for count in each:
            total += count
            so_far.append(total / 1e6)
        axes.plot(rounds, so_far, color=colour, label=label, linestyle="-" if colour == PALETTE[0] else "--")
    axes.set_ylabel("MB so far")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,g}")
    round_axis(axes)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def round_axis(axes: Any, names: Sequence[int] | None = None) -> None:
    """Whole rounds only; `names` where the places on the axis are not the rounds themselves."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("Round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if names is not None:
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda at, _: str(names[int(at)]) if 0 <= at < len(names) and at == int(at) else "")
        )


def _name_bars(axes: Any, names: Sequence[str]) -> None:
    step = math.ceil(len(names) / 40) or 1
    shown = range(0, len(names), step)
    room = 90 / max(len(names), 1) if len(names) > FEW_SITES else 56 / max(len(names), 1)  # characters a bar
    crowded = any(len(names[at]) > room for at in shown)
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(shown, [shorten(names[at], 18) for at in shown], parse_math=False, **turned)


def name_rows(axes: Any, names: Sequence[str]) -> None:
    step = math.ceil(len(names) / 60) or 1
    shown = range(0, len(names), step)
    axes.set_yticks(shown, [shorten(names[at]) for at in shown], parse_math=False)


def legend_columns(labels: Sequence[str], wide: bool) -> int:
    """As many as fit: a line holds about 150 (wide) or 72 characters, handles included."""
    longest = max(len(shorten(label)) for label in labels)
    return max(1, min(len(labels), (150 if wide else 72) // (longest + 7)))
