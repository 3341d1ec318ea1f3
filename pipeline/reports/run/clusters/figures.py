"""Groups drawn: who was in which one from round to round, and the tree that they were cut from."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.reports.document.figure_style import INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.document.formatting import count_of, shorten
from pipeline.reports.run.curves import COLUMNS, legend_columns, name_rows, round_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colours = Mapping[str, str]  # group -> colour
MOST_ROWS = 60  # as many as get full height
ROW, LETTER = 0.24, 0.075  # inches: of a row, and of a letter in a cell
OTHERS = PALETTE[8]
SHADES = tuple(colour for colour in PALETTE if colour != OTHERS)
FINE = 14  # pixels a row, of which the first and the last stay blank
FILL = 0.55  # never opaque: the ink stays readable on both themes


def colours_of(names: Sequence[str], ours: Collection[str]) -> dict[str, str]:
    """Each its own as far as they go; of the groups that are not ours the rest share one, and ours begin again."""
    own = {name: SHADES[place % len(SHADES)] for place, name in enumerate(names) if place < len(SHADES) or name in ours}
    return {name: own.get(name, OTHERS) for name in names}


@styled()
def membership(
    sites: Sequence[str],
    rounds: Sequence[int],
    groups: Sequence[Mapping[str, str]],
    colours: Colours,
    at: int,
) -> Figure:
    """groups[round][site]; `sites` in the order of their groups in the round at place `at`, which stand at the right."""
    import numpy as np
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    tall = 1.5 + ROW * min(len(sites), MOST_ROWS)
    figure, axes = new_figure((WIDE[0], tall))
    per_column = max(1, math.ceil(len(rounds) / COLUMNS))
    last = [min(start + per_column, len(rounds)) - 1 for start in range(0, len(rounds), per_column)]
    shown = [[groups[turn].get(site) for turn in last] for site in sites]
    cells = np.zeros((len(sites), len(last), 4))  # transparent: unknown
    for row, names in enumerate(shown):
        for column, name in enumerate(names):
            if name is not None:
                cells[row, column] = (*to_rgb(colours[name]), FILL)
    if len(sites) <= MOST_ROWS:  # rows part from each other
        cells = np.repeat(cells, FINE, axis=0)
        cells[0::FINE] = cells[FINE - 1 :: FINE] = 0
    axes.imshow(cells, aspect="auto", interpolation="none", extent=(-0.5, len(rounds) - 0.5, len(sites) - 0.5, -0.5))
    if len(sites) <= MOST_ROWS:
        _name_runs(axes, shown, per_column)
    if at != len(rounds) - 1:
        axes.axvline(at, color=INK, linewidth=1, linestyle=":")
    _name_groups(axes, sites, groups[at], len(rounds), tall - 1.5)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    name_rows(axes, sites)
    round_axis(axes, rounds)
    labels = {"others" if colour == OTHERS else name: colour for name, colour in colours.items()}
    handles = [
        Line2D([], [], marker="s", linestyle="", markersize=8, markeredgewidth=0, color=colour, alpha=0.7, label=label)
        for label, colour in labels.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns(list(labels), wide=True))
    return figure


def _name_runs(axes: Any, shown: Sequence[Sequence[str | None]], per_column: int) -> None:
    """Every stretch in one group says its name where there is room: colours may be alike."""
    room = (WIDE[0] - 2.6) / max(len(shown[0]), 1) if shown else 0.0  # inches a column
    for row, names in enumerate(shown):
        start = 0
        for column in range(1, len(names) + 1):
            if column < len(names) and names[column] == names[start]:
                continue
            name = names[start]
            if name is not None and (column - start) * room > LETTER * (len(name) + 1):
                left = start * per_column - 0.5 + 0.25 * LETTER / room * per_column
                axes.text(left, row, name, ha="left", va="center_baseline", fontsize=7.5)
            start = column


def _name_groups(axes: Any, sites: Sequence[str], members: Mapping[str, str], columns: int, height: float) -> None:
    """At the right, beside its rows; a name that would lie on the one above it is left out."""
    start, free = 0, -1.0
    edge = columns - 0.5
    for row in range(1, len(sites) + 1):
        group = members.get(sites[start])
        if row < len(sites) and members.get(sites[row]) == group:
            continue
        if start:
            axes.axhline(start - 0.5, color=INK, alpha=0.5, linewidth=0.7)
        middle = (start + row - 1) / 2
        inches = height * middle / len(sites)
        if group is not None and inches >= free:
            words = f"{shorten(group, 14)}: {count_of(row - start, 'site')}"
            axes.text(edge + 0.01 * columns, middle, words, ha="left", va="center", fontsize=8.5)
            free = inches + 0.15
        start = row


@styled()
def tree(
    leaves: Sequence[str],
    merges: Sequence[Sequence[float]],
    members: Mapping[str, str],
    colours: Colours,
    title: str,
) -> Figure:
    """A dendrogram, the sites at the left; a branch has its group's colour as long as all of it is in one group."""
    import numpy as np
    from matplotlib.colors import to_rgba
    from matplotlib.ticker import MaxNLocator
    from scipy.cluster.hierarchy import dendrogram

    figure, axes = new_figure((WIDE[0], 1.0 + ROW * len(leaves)))
    below: list[set[str | None]] = [{members.get(site)} for site in leaves]
    for first, second, *_ in merges:
        below.append(below[int(first)] | below[int(second)])
    inner = [next(iter(found)) if len(found) == 1 else None for found in below]
    drawn = dendrogram(
        np.asarray(merges, dtype=float), no_plot=True, link_color_func=lambda node: colours.get(inner[node] or "", INK)
    )
    for places, distances, colour in zip(drawn["icoord"], drawn["dcoord"], drawn["color_list"], strict=True):
        mixed = colour == INK
        axes.plot(distances, places, color=colour, alpha=0.6 if mixed else 1.0, linewidth=1.1 if mixed else 1.8)
    order = [leaves[leaf] for leaf in drawn["leaves"] or ()]
    names = [f"{shorten(site)} · {members[site]}" if site in members else shorten(site) for site in order]
    axes.set_yticks([10 * place + 5 for place in range(len(order))], names, parse_math=False)
    for label, site in zip(axes.get_yticklabels(), order, strict=True):
        if site in members:
            ground = to_rgba(colours[members[site]], 0.35)
            label.set_bbox({"boxstyle": "round,pad=0.25", "facecolor": ground, "linewidth": 0})
    axes.tick_params(axis="y", pad=7)
    axes.set_ylim(10 * len(order), 0)
    heights = [float(merge[2]) for merge in merges]
    furthest = max(heights, default=0.0) or 1.0
    axes.set_xlim(-0.006 * furthest, 1.04 * furthest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=all(height.is_integer() for height in heights)))
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(title)
    return figure
