"""The section of a run's report about sites that have models of their own: what these gain over the common one, and over none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.reports.document.figure_style import HALF, INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.document.formatting import PERCENT, SPLITS, UNDEFINED, points, score, shorten, whole
from pipeline.reports.document.page import Cell, Column, Sheet
from pipeline.reports.run.baselines.text import TINY, alike_words, all_alike, gain_words, gains_of
from pipeline.reports.run.headline_metric import Lens, interval_in
from pipeline.reports.run.record import Json, Record, number, site_values, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 30  # sites, a line each; more become dots
BEST = "★"
Scores = Mapping[str, float]


def personal(sheet: Sheet, record: Record, lens: Lens) -> None:
    split, scores = record.scores()
    mine: Json = scores.get("sites") or {}
    metric = lens.among(mine)
    own, common = site_values(mine, metric), site_values(view(scores, "global").get("sites") or {}, metric)
    gains = gains_of(own, common)
    if not gains:
        return
    alone = _alone(record, metric)
    sheet.page.section("Own models and the common one").findings(_findings(own, common, alone, metric))
    rows = [Personal(site, common[site], own[site], alone.get(site)) for site in gains]
    _draw(sheet, rows, lens.name(metric), metric in PERCENT)
    _table(sheet, rows, mine, lens, metric, split)


def _alone(record: Record, metric: str) -> dict[str, float]:
    yards: Json = (record.results or {}).get("yardsticks") or {}
    test: Json = (yards.get("local") or {}).get("test") or {}
    return site_values(test.get("sites") or {}, metric)


def _findings(own: Scores, common: Scores, alone: Scores, metric: str) -> list[str]:
    found = [
        f"Against {whom}, a site's own model {_compared(gains)}."
        for whom, theirs in (("the common model", common), ("training alone", alone))
        if (gains := gains_of(own, theirs))
    ]
    weakest = min(own, key=lambda site: own[site])
    others = [
        f"{score(metric, theirs[weakest])} {words}"
        for theirs, words in ((common, "with the common model"), (alone, "alone"))
        if weakest in theirs
    ]
    found.append(f"The weakest site is {weakest}: {score(metric, own[weakest])} with its own; {', '.join(others)}.")
    caution = "One training run each; another seed would move the scores. Differences at single sites are not tested."
    return [*found, caution]


def _compared(gains: Scores) -> str:
    return f"does about the same {alike_words(gains)}" if all_alike(gains) else gain_words(gains)


def _draw(sheet: Sheet, rows: Sequence[Personal], title: str, percent: bool) -> None:
    if len(rows) <= MOST_LINES:
        ordered = sorted(rows, key=lambda row: -row.gain)
        caption = "From the common model to the site's own; further right is better. The largest gain is on top."
        if any(row.alone is not None for row in rows):
            caption += " The tick is what the site reaches alone."
        sheet.draw("personal", dumbbells(ordered, title, percent), caption)
        return
    own = {row.site: row.own for row in rows}
    alone = {row.site: row.alone for row in rows if row.alone is not None}
    for key, theirs, whose in (
        ("personal", {row.site: row.common for row in rows}, "common model"),
        ("personal_alone", alone, "alone"),
    ):
        if theirs:
            caption = f"A mark a site: its own model against {'training alone' if theirs is alone else 'the common model'}. Above the line, its own is better."
            sheet.draw(key, against(theirs, own, whose, title, percent), caption)


def _table(sheet: Sheet, rows: Sequence[Personal], mine: Json, lens: Lens, metric: str, split: str) -> None:
    with_alone = any(row.alone is not None for row in rows)
    cells = [_row(row, mine, lens, metric, with_alone) for row in rows]
    columns = [Column("Site"), Column("Examples", True), Column("Common model", True), Column("Own model", True)]
    columns += [Column("Alone", True)] if with_alone else []
    columns += [Column("Own − common, points", True)] + ([Column("Own − alone, points", True)] if with_alone else [])
    caption = f"{lens.name(metric)} on {SPLITS[split]} data, site by site. {BEST} marks the best of a row."
    if any(interval_in(lens.common, metric, row.site) for row in rows):
        caption += f" In brackets, {lens.level} intervals of the common model."
    sheet.page.table(columns, cells, caption)


def _row(row: Personal, mine: Json, lens: Lens, metric: str, with_alone: bool) -> list[Cell]:
    values = [row.common, row.own, *([row.alone] if with_alone else [])]
    shown = [score(metric, value) for value in values]
    best = score(metric, max(value for value in values if value is not None))
    marked = [f"{BEST} {words}" if words == best and len(set(shown)) > 1 else words for words in shown]
    edges = interval_in(lens.common, metric, row.site)
    first = lens.cell(metric, row.common, edges)
    cells: list[Cell] = [marked[0] if isinstance(first, str) else (marked[0], first[1]), *marked[1:]]
    apart = [points(row.gain)]
    if with_alone:
        apart.append(UNDEFINED if row.alone is None else points(row.own - row.alone))
    return [row.site, whole(number((mine.get(row.site) or {}).get("n"))), *cells, *apart]


# A site's own model beside the common one: a line a site, or, of many sites, a dot each against the diagonal.

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
