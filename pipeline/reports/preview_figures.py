"""What a preview draws: colours of sites beside each other, or points of the plane."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.reports.svg import INK, PALETTE, WIDE, styled
from pipeline.reports.words import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 48
CHANNELS: Mapping[int, Sequence[tuple[str, str]]] = {
    3: (("Red", "#c9505f"), ("Green", "#3f9e6d"), ("Blue", "#3f7fc1")),
    1: (("Grey", "#7d8a97"),),
}


@styled()
def channel_means(sites: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """site -> (means, spreads) in [0, 1]; a panel a channel, a row a site."""
    channels = CHANNELS[len(next(iter(sites.values()))[0])]
    figure, panels = _panels(1, len(channels), (WIDE[0], 0.9 + 0.3 * len(sites)))
    for at, ((name, colour), axes) in enumerate(zip(channels, panels, strict=True)):
        for row, (means, spreads) in enumerate(sites.values()):
            edges = [max(means[at] - spreads[at], 0), min(means[at] + spreads[at], 1)]
            axes.plot(edges, [row, row], color=colour, alpha=0.35, linewidth=4, solid_capstyle="butt")
            axes.plot(means[at], row, marker="o", markersize=6, color=colour, linestyle="")
        axes.set_title(name, fontsize=9.5, loc="left")
        axes.set_yticks(range(len(sites)), [shorten(site, 22) if not at else "" for site in sites], parse_math=False)
        axes.set_ylim(len(sites) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
    return figure


@styled()
def channel_histograms(sites: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """site -> channel -> shares of BINS bins over [0, 1]."""
    channels = CHANNELS[len(next(iter(sites.values())))]
    figure, panels = _panels(1, len(channels), (WIDE[0], 3.1))
    middles = [(at + 0.5) / BINS for at in range(BINS)]
    for at, ((name, _), axes) in enumerate(zip(channels, panels, strict=True)):
        for nth, (site, histograms) in enumerate(sites.items()):
            axes.plot(
                middles, [100 * share for share in histograms[at]], color=PALETTE[nth % len(PALETTE)], linewidth=1.5,
                linestyle=("-", "--")[nth % 2], label=None if at else shorten(site, 22),
            )  # fmt: skip
        axes.set_title(name, fontsize=9.5, loc="left")
        axes.set_xlim(*_reach(sites.values()))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("Brightness")
    panels[0].set_ylabel("Pixels, %")
    figure.legend(loc="outside lower center", ncols=min(len(sites), 6))
    return figure


@styled()
def scatters(classes: Sequence[str], sites: Mapping[str, tuple[Any, Any]]) -> Figure:
    """site -> x (n, 2 or more), y (n,); a panel a site."""
    columns = min(len(sites), 4)
    rows = math.ceil(len(sites) / columns)
    figure, panels = _panels(rows, columns, (WIDE[0], 0.6 + 2.5 * rows), share_up=True)
    for axes, (site, (x, y)) in zip(panels, sites.items(), strict=False):
        for label, name in enumerate(classes):
            mine = x[y == label]
            axes.plot(
                mine[:, 0], mine[:, 1], color=PALETTE[label % len(PALETTE)], linestyle="", marker="os^Dv"[label % 5],
                markersize=3, alpha=0.6, markeredgewidth=0, label=shorten(name) if axes is panels[0] else None,
            )  # fmt: skip
        axes.set_title(shorten(site, 24), fontsize=9.5, loc="left", parse_math=False)
    for axes in panels[len(sites) :]:
        axes.set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(len(classes), 6), labelcolor=INK)
    return figure


def _reach(sites: Iterable[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The brightness that occurs at all, the same for every panel."""
    used = [at for histograms in sites for shares in histograms for at, share in enumerate(shares) if share > 0.001]
    return (min(used) / BINS, (max(used) + 1) / BINS) if used else (0.0, 1.0)


def _panels(rows: int, columns: int, size: tuple[float, float], share_up: bool = False) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=share_up, squeeze=False)
    return figure, list(grid.flat)
