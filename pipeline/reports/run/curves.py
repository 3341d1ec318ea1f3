"""Figures of sites and rounds: learning curves, class counts, stragglers, traffic. Figures of scores are in scores.py."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from pipeline.reports.document.figure_style import (
    FULL_WIDTH_INCHES,
    HALF_WIDTH_INCHES,
    INK_COLOR,
    PALETTE,
    apply_figure_style,
    new_figure,
)
from pipeline.reports.document.formatting import shorten_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BandLevel = Literal["68", "95"]
BAND_WIDTH_STD: Mapping[BandLevel, float] = {"68": 1.0, "95": 1.96}  # on each side of the mean
MAX_HALF_WIDTH_SITES = 6  # with more bars, the figure has full width
MAX_FILLED_BANDS = 4  # with more curves, only the edges of the bands are drawn
MAX_MARKED_ROUNDS = 30  # up to here each round has a marker
MAX_HEATMAP_COLUMNS = 120  # with more rounds, several share a column


@dataclass(frozen=True)
class CurveSeries:
    label: str
    rounds: Sequence[int]
    values: Sequence[float]
    std_over_sites: Sequence[float] | None = None  # one per round
    is_dashed: bool = False
    color: str | None = None  # else by its place


def mean_over_sites(label: str, by_round: Mapping[int, Sequence[float]], color: str | None = None) -> CurveSeries:
    """Mean and population standard deviation over sites, by round."""
    rounds = sorted(by_round)
    means = [fmean(by_round[round_number]) for round_number in rounds]
    return CurveSeries(label, rounds, means, [pstdev(by_round[round_number]) for round_number in rounds], color=color)


def band_edges(series: CurveSeries, band: BandLevel) -> tuple[list[float], list[float]]:
    width = BAND_WIDTH_STD[band]
    spread = [width * deviation for deviation in series.std_over_sites or [0.0] * len(series.values)]
    pairs = list(zip(series.values, spread, strict=True))
    return [value - margin for value, margin in pairs], [value + margin for value, margin in pairs]


@apply_figure_style()
def plot_curves(
    series: Sequence[CurveSeries],
    title: str,
    band: BandLevel = "68",
    percent: bool = False,
    wide: bool = False,
    y_limits: tuple[float, float] | None = None,
) -> Figure:
    figure, axes = new_figure(FULL_WIDTH_INCHES if wide else HALF_WIDTH_INCHES)
    for index, curve in enumerate(series):
        color = curve.color or PALETTE[index % len(PALETTE)]
        scale = 100 if percent else 1
        axes.plot(
            curve.rounds,
            [scale * value for value in curve.values],
            color=color,
            label=shorten_text(curve.label, 40),
            linestyle="--" if curve.is_dashed else "-",
            linewidth=1.0 if len(curve.rounds) > 10 * MAX_MARKED_ROUNDS else 1.3 if curve.is_dashed else 1.8,
            marker="o" if len(curve.rounds) <= MAX_MARKED_ROUNDS and not curve.is_dashed else None,
            markersize=3,
        )
        if curve.std_over_sites is not None:
            low, high = ([scale * value for value in edge] for edge in band_edges(curve, band))
            if len(series) <= MAX_FILLED_BANDS:
                axes.fill_between(curve.rounds, low, high, color=color, alpha=0.18, linewidth=0)
            else:  # filled bands would hide each other
                axes.plot(curve.rounds, low, curve.rounds, high, color=color, alpha=0.35, linewidth=0.5)
    if percent:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -1), min(high, 101))
    if y_limits is not None:
        axes.set_ylim(y_limits)
    axes.set_ylabel(f"{title}, %" if percent else title)
    format_round_axis(axes)
    if series:
        figure.legend(loc="outside lower center", ncols=num_legend_columns([curve.label for curve in series], wide))
    return figure


@apply_figure_style()
def plot_class_counts(classes: Sequence[str], counts: Mapping[str, Sequence[int]]) -> Figure:
    """Stacked bars, one per site."""
    wide = len(counts) > MAX_HALF_WIDTH_SITES
    figure, axes = new_figure(FULL_WIDTH_INCHES if wide else HALF_WIDTH_INCHES)
    bottoms = [0] * len(counts)
    for class_index, label in enumerate(classes):
        heights = [site_counts[class_index] for site_counts in counts.values()]
        axes.bar(
            range(len(counts)),
            heights,
            0.8,
            bottom=bottoms,
            color=PALETTE[class_index % len(PALETTE)],
            label=shorten_text(label),
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel("Examples")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="x", visible=False)
    _label_bars(axes, list(counts))
    if classes:
        figure.legend(loc="outside lower center", ncols=num_legend_columns(classes, wide))
    return figure


@apply_figure_style()
def plot_stragglers(
    sites: Sequence[str],
    rounds: Sequence[int],
    done_fraction: Sequence[Sequence[float | None]],
    missed: Collection[tuple[int, int]],
) -> Figure:
    """A heatmap of completed work.

    `done_fraction[site][round]`: completed fraction of the requested steps, None if the site was not sampled.
    `missed`: (site index, round index) of updates that were not accepted.
    """
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    figure, axes = new_figure((FULL_WIDTH_INCHES[0], 1.5 + 0.22 * min(len(sites), 60)))
    per_column = max(1, math.ceil(len(rounds) / MAX_HEATMAP_COLUMNS))
    columns = [range(start, min(start + per_column, len(rounds))) for start in range(0, len(rounds), per_column)]
    cells = np.zeros((len(sites), len(columns), 4))  # transparent: not sampled
    for row in range(len(sites)):
        for column, round_indices in enumerate(columns):
            if any((row, round_index) in missed for round_index in round_indices):
                missed_fraction = sum((row, round_index) in missed for round_index in round_indices) / len(
                    round_indices
                )
                cells[row, column] = (*to_rgb(PALETTE[3]), 0.35 + 0.5 * missed_fraction)
            elif done_values := [
                value for round_index in round_indices if (value := done_fraction[row][round_index]) is not None
            ]:
                cells[row, column] = (*to_rgb(PALETTE[0]), 0.08 + 0.77 * min(fmean(done_values), 1.0))
    num_positions = columns[-1].stop if columns else 1
    edges = (-0.5, num_positions - 0.5, len(sites) - 0.5, -0.5)
    axes.imshow(cells, aspect="auto", interpolation="none", extent=edges)
    if per_column == 1 and len(rounds) <= 2 * MAX_MARKED_ROUNDS and missed:
        rows, missed_rounds = zip(*sorted(missed), strict=True)
        axes.scatter(missed_rounds, rows, marker="x", s=14, linewidths=1, color=INK_COLOR)
    axes.grid(visible=False)
    label_rows(axes, sites)
    format_round_axis(axes, rounds)
    legend = [
        Line2D([], [], marker="s", linestyle="", markersize=8, markeredgewidth=0, color=color, alpha=alpha, label=label)
        for color, alpha, label in (
            (PALETTE[0], 0.85, "all steps"),
            (PALETTE[0], 0.4, "some steps"),
            (PALETTE[3], 0.7, "missing update"),
        )
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3)
    return figure


@apply_figure_style()
def plot_traffic(rounds: Sequence[int], uplink_bytes: Sequence[int], downlink_bytes: Sequence[int]) -> Figure:
    """Cumulative megabytes."""
    figure, axes = new_figure()
    for label, bytes_by_round, color in (
        ("uplink (sites to coordinator)", uplink_bytes, PALETTE[0]),
        ("downlink", downlink_bytes, PALETTE[1]),
    ):
        total, cumulative_mb = 0, []
        for num_bytes in bytes_by_round:
            total += num_bytes
            cumulative_mb.append(total / 1e6)
        axes.plot(rounds, cumulative_mb, color=color, label=label, linestyle="-" if color == PALETTE[0] else "--")
    axes.set_ylabel("Cumulative MB")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,g}")
    format_round_axis(axes)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def format_round_axis(axes: Any, round_numbers: Sequence[int] | None = None) -> None:
    """Integer ticks; `round_numbers` maps axis positions to rounds where these differ."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("Round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if round_numbers is not None:
        axes.xaxis.set_major_formatter(
            FuncFormatter(
                lambda position, _: (
                    str(round_numbers[int(position)])
                    if 0 <= position < len(round_numbers) and position == int(position)
                    else ""
                )
            )
        )


def _label_bars(axes: Any, names: Sequence[str]) -> None:
    step = math.ceil(len(names) / 40) or 1
    shown_indices = range(0, len(names), step)
    max_label_chars = 90 / max(len(names), 1) if len(names) > MAX_HALF_WIDTH_SITES else 56 / max(len(names), 1)
    is_crowded = any(len(names[index]) > max_label_chars for index in shown_indices)
    rotation_style = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if is_crowded else {}
    axes.set_xticks(
        shown_indices, [shorten_text(names[index], 18) for index in shown_indices], parse_math=False, **rotation_style
    )


def label_rows(axes: Any, names: Sequence[str]) -> None:
    step = math.ceil(len(names) / 60) or 1
    shown_indices = range(0, len(names), step)
    axes.set_yticks(shown_indices, [shorten_text(names[index]) for index in shown_indices], parse_math=False)


def num_legend_columns(labels: Sequence[str], wide: bool) -> int:
    """As many as fit: a line has room for about 150 (wide) or 72 characters, legend handles included."""
    longest = max(len(shorten_text(label)) for label in labels)
    return max(1, min(len(labels), (150 if wide else 72) // (longest + 7)))
