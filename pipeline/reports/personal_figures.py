"""A site's own model beside the common one: a line a site, or, of many sites, a dot each against the diagonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.reports.gains import TINY, gains_of
from pipeline.reports.svg import HALF, INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.words import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN, COMMON, WORSE, ALONE = PALETTE[0], PALETTE[1], PALETTE[3], INK


@dataclass(frozen=True)
class Personal:
    """One site's scores; None where unknown."""

    site: str
    common: float
    own: float
    alone: float | None = None

    @property
    def gain(self) -> float:
        return self.own - self.common


@styled()
def dumbbells(rows: Sequence[Personal], title: str, percent: bool) -> Figure:
    """From the common model, a ring, to the site's own, a dot; a tick where it would be alone."""
    from matplotlib.lines import Line2D

    figure, axes = new_figure((WIDE[0], 1.25 + 0.3 * len(rows)))
    scale = 100 if percent else 1
    for at, row in enumerate(rows):
        colour = WORSE if row.gain <= -TINY else OWN
        axes.plot([scale * row.common, scale * row.own], [at, at], color=colour, alpha=0.55, linewidth=2.6, zorder=1)
    alone = [(scale * row.alone, at) for at, row in enumerate(rows) if row.alone is not None]
    places = range(len(rows))
    axes.scatter([scale * row.common for row in rows], places, s=46, marker="o", facecolors="none", edgecolors=COMMON,
                 linewidths=1.8, zorder=3)  # fmt: skip
    axes.scatter([scale * row.own for row in rows], places, s=46, marker="o", color=OWN, linewidths=0, zorder=2)
    axes.scatter([x for x, _ in alone], [y for _, y in alone], s=150, marker="|", color=ALONE, linewidths=1.8, zorder=4)
    axes.set_yticks(places, [shorten(row.site, 30) for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"{title}, %" if percent else title, parse_math=False)
    legend = [
        Line2D([], [], marker="o", linestyle="", markersize=7, markerfacecolor="none", markeredgewidth=1.8,
               markeredgecolor=COMMON, label="common model"),
        Line2D([], [], marker="o", linestyle="", markersize=7, markeredgewidth=0, color=OWN, label="own model"),
        Line2D([], [], marker="|", linestyle="", markersize=12, markeredgewidth=1.8, color=ALONE, label="alone"),
        Line2D([], [], color=WORSE, alpha=0.55, linewidth=2.6, label="own is worse"),
    ]  # fmt: skip
    shown = [True, True, bool(alone), any(row.gain <= -TINY for row in rows)]
    handles = [handle for handle, there in zip(legend, shown, strict=True) if there]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


@styled()
def against(theirs: Mapping[str, float], own: Mapping[str, float], whose: str, title: str, percent: bool) -> Figure:
    """Across, their scores; upward, those of the sites' own models: above the line, the own one is better."""
    figure, axes = new_figure(HALF)
    scale = 100 if percent else 1
    gains = gains_of(own, theirs)
    looks = (("own is better", OWN, "^"), ("about the same", PALETTE[8], "o"), ("own is worse", WORSE, "v"))
    for place, (label, colour, marker) in enumerate(looks):
        sites = [site for site, gain in gains.items() if _side(gain) == place]
        if sites:
            across, upward = ([scale * scores[site] for site in sites] for scores in (theirs, own))
            words = f"{label} ({len(sites):,})"
            axes.scatter(across, upward, s=26, marker=marker, color=colour, alpha=0.75, linewidths=0, label=words)
    every = [scale * scores[site] for site in gains for scores in (theirs, own)]
    low, high = min(every), max(every)
    pad = 0.06 * (high - low) or 0.01 * scale
    axes.plot([low - pad, high + pad], [low - pad, high + pad], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    axes.set_xlim(low - pad, high + pad)
    axes.set_ylim(low - pad, high + pad)
    axes.set_box_aspect(0.72)
    unit = ", %" if percent else ""
    axes.set_xlabel(f"{title}{unit}: {whose}", parse_math=False)
    axes.set_ylabel(f"{title}{unit}: own model", parse_math=False)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _side(gain: float) -> int:
    return 0 if gain >= TINY else 2 if gain <= -TINY else 1
