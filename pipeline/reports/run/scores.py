"""The sections of a run's report about the model as a whole: headline, results by site, learning curves.

Each adds itself to the sheet, or nothing where the run has nothing to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import TYPE_CHECKING, Any

from pipeline.reports.document.figure_style import HALF, INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.document.formatting import METRICS, PERCENT, SPLITS, duration, score, shorten, size, whole
from pipeline.reports.document.page import COORDINATOR, POOLED, Cell, Column, Sheet
from pipeline.reports.run import curves as figures
from pipeline.reports.run.curves import Band, Series
from pipeline.reports.run.headline_metric import DETECTION, RANKED, Lens, worst_site
from pipeline.reports.run.record import Json, Record, number, site_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHOLES = (("coordinator", COORDINATOR), ("pooled", POOLED))
MANY_SITES, FEW_SITES = 24, 10  # of more than many, the results show the few weakest, and all of them folded
BAND_WORDS: Mapping[Band, str] = {
    "68": "The band is one standard deviation over sites (68 %).",
    "95": "The band is 1.96 standard deviations over sites (95 %).",
}


def headline(sheet: Sheet, record: Record, lens: Lens) -> None:
    split, scores = _fair_scores(record, lens)
    where, main = lens.whole(scores)
    detects = lens.metric in DETECTION
    known = [metric for metric in DETECTION if detects and number(main.get(metric)) is not None]
    tiles: list[tuple[str, Cell]] = [
        (lens.name(metric), _with_interval(lens, metric, main, scores))
        for metric in dict.fromkeys([*known, lens.metric, "accuracy"])
    ]
    if where:
        if lens.several and main is scores.get("pooled"):
            where = "mean over sites" if lens.metric in RANKED else where
            where += ", own models" if record.personal else ""
        tiles[0] = (f"{tiles[0][0]}, {SPLITS[split]} ({where})", tiles[0][1])
    sites: Json = scores.get("sites") or {}
    ranking = lens.among(sites)
    if worst := worst_site(sites, ranking):
        value = score(ranking, number(sites[worst].get(ranking)))
        tiles.append((f"Lowest {lens.short(ranking)} of a site: {shorten(worst)}", value))
    sheet.page.tiles(tiles, lead=True).tiles(_facts(record))


def _fair_scores(record: Record, lens: Lens) -> tuple[str, Json]:
    split, scores = record.scores()
    return split, lens.fair(scores)


def _facts(record: Record) -> list[tuple[str, Cell]]:
    results = record.results or {}
    rounds = number(results.get("rounds"))
    return [
        ("Best round", whole(number(results.get("best_round")))),
        ("Sites", whole(len(record.sites))),
        ("Rounds", whole(record.last_round if rounds is None else rounds)),
        ("Traffic, both ways", size(record.traffic("up") + record.traffic("down"))),
        ("Time", duration(record.seconds)),
    ]


def _with_interval(lens: Lens, metric: str, metrics: Json, scores: Json) -> Cell:
    where = next((where for where, _ in WHOLES if metrics is scores.get(where)), "")
    return lens.cell(metric, number(metrics.get(metric)), lens.interval(metric, where=where))


def outcome(sheet: Sheet, record: Record, lens: Lens) -> None:
    split, scores = _fair_scores(record, lens)
    sites: Json = scores.get("sites") or {}
    there = [(where, words) for where, words in WHOLES if scores.get(where)]
    found = [scores[where] for where, _ in there] + [metrics or {} for metrics in sites.values()]
    if not found:
        return
    shown = lens.columns(found, len(record.data.get("classes") or ()))
    wholes = [(_whole_words(record, lens, where, words, shown), scores[where]) for where, words in there]
    first: list[list[Cell]] = [
        [words, whole(number(metrics.get("n"))), *(_with_interval(lens, metric, metrics, scores) for metric in shown)]
        for words, metrics in wholes
    ]
    columns = [Column("Judged on"), Column("Examples", True), *(Column(lens.name(metric), True) for metric in shown)]
    ranking = lens.among(sites)
    listed = _weakest(sites, ranking) if len(sites) > MANY_SITES else list(sites)
    worst = worst_site(sites, ranking)
    marked = len(wholes) + listed.index(worst) if worst else None
    rows = first + [_site_row(lens, site, sites[site] or {}, shown) for site in listed]
    caption = f"All together, and the {len(listed)} weakest of {len(sites):,} sites" if len(listed) < len(sites) else ""
    sheet.page.section(f"Results on {SPLITS[split]} data").text(*_outcome_words(record, lens, sites))
    sheet.page.table(columns, rows, caption, highlight=marked, badge=f"lowest {lens.short(ranking)}")
    if caption:
        every = [_site_row(lens, site, metrics or {}, shown) for site, metrics in sites.items()]
        sheet.page.table(columns, every, f"All {len(sites):,} sites")


def _whole_words(record: Record, lens: Lens, where: str, words: str, shown: Sequence[str]) -> Cell:
    """Where there are several models, which of them a row is about."""
    if not lens.several:
        return words
    if where == "coordinator":
        return words, "the common model"
    grouped = not record.personal and any(line.get("groups") for line in record.rounds)
    own = "every site by its group's model" if grouped else "every site by its own model"
    return words, f"{own}; rank-based scores are means over sites" if RANKED & {*shown} else own


def _weakest(sites: Json, metric: str) -> list[str]:
    known = site_values(sites, metric)
    return sorted(known, key=lambda site: known[site])[:FEW_SITES] or list(sites)[:FEW_SITES]


def _site_row(lens: Lens, site: str, metrics: Json, shown: Sequence[str]) -> list[Cell]:
    values = ((metric, number(metrics.get(metric))) for metric in shown)
    cells = [lens.cell(metric, value, lens.interval(metric, site)) for metric, value in values]
    return [site, whole(number(metrics.get("n"))), *cells]


def _outcome_words(record: Record, lens: Lens, sites: Json) -> list[str]:
    results = record.results
    if not results:
        return ["As last judged, before the end of the run."]
    words = f"The model{'s' if lens.several else ''} of round {results.get('best_round')}"
    words += f", {_chosen_by(str(results['chosen_by']), lens)}." if results.get("chosen_by") else "."
    if results.get("stopped") not in (None, "", "finished"):
        words += f" The run ended: {results['stopped']}."
    ranking = lens.among(sites)
    values = site_values(sites, ranking).values()
    if len(values) > 1:
        words += f" Between sites, {lens.short(ranking)} has a standard deviation of {100 * pstdev(values):.1f} points."
    return [words, lens.method] if lens.method else [words]


def _chosen_by(recorded: str, lens: Lens) -> str:
    """`val accuracy` -> chosen by accuracy on validation data; anything else as it is."""
    if recorded == "last round":
        return "the last"
    split, _, metric = recorded.partition(" ")
    known = split in SPLITS and metric in METRICS
    return f"chosen by {lens.short(metric)} on {SPLITS[split]} data" if known else f"chosen by {recorded}"


def learning(sheet: Sheet, record: Record, lens: Lens, band: Band) -> None:
    split = record.best_split()
    leading = lens.metric if _series(record, split, lens.metric) else "accuracy"
    drawn = [(metric, _series(record, split, metric)) for metric in (leading, "loss")]
    if not any(series for _, series in drawn):
        return
    sheet.page.section("Learning curves")
    for metric, series in drawn:
        if not series:
            continue
        banded = any(one.deviation is not None for one in series)
        caption = f"{lens.name(metric)} on {SPLITS[split]} data after every round; round 0 is the untrained start."
        figure = figures.curves(series, lens.name(metric), band, percent=metric in PERCENT)
        sheet.draw(metric, figure, f"{caption} {BAND_WORDS[band]}" if banded else caption)


def _series(record: Record, split: str, metric: str) -> list[Series]:
    found = []
    if points := record.judged(split, "coordinator", metric):
        found.append(_line(f"{COORDINATOR}, common model" if record.personal else COORDINATOR, points, PALETTE[0]))
    if by_round := record.judged_by_sites(split, metric):
        words = "Mean over sites, own models" if record.personal else "Mean over sites"
        found.append(figures.over_sites(words, by_round, PALETTE[1]))
    elif points := record.judged(split, "pooled", metric):
        found.append(_line(POOLED, points, PALETTE[1]))
    return found


def _line(label: str, points: Sequence[tuple[int, float]], colour: str) -> Series:
    return Series(label, [turn for turn, _ in points], [value for _, value in points], colour=colour)


# What a report draws about one model's scores: confusion, ROC, precision-recall, reliability.

MOST_LINES, MOST_POINTS = 40, 100  # of single sites
FEW_CLASSES = 6  # as many as a half-width matrix takes, with shares under the counts


@styled()
def confusion(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Rows are the truth. Numbers are counts; the colour is the share of the row."""
    import numpy as np
    from matplotlib.colors import to_rgb

    few = len(classes) <= FEW_CLASSES
    figure, axes = new_figure(HALF if few else (WIDE[0], 1.6 + 0.32 * len(classes)))
    table = np.asarray(counts, dtype=float)
    share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    cells = np.zeros((*table.shape, 4))
    cells[..., :3] = to_rgb(PALETTE[0])
    cells[..., 3] = 0.03 + 0.72 * share  # never opaque: the ink stays readable on both themes
    axes.imshow(cells, aspect="auto", interpolation="none")
    for row, column in np.ndindex(*table.shape):
        number = f"{table[row, column]:,.0f}"
        words = f"{number}\n{100 * share[row, column]:.0f} %" if few else number
        strength = 1.0 if table[row, column] else 0.45
        axes.text(column, row, words, ha="center", va="center", fontsize=9 if few else 8, alpha=strength)
    names = [shorten(label, 16) for label in classes]
    crowded = max(map(len, names)) * len(names) > (48 if few else 90)
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(names)), names, parse_math=False, **turned)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xlabel("Predicted")
    axes.set_ylabel("Truth")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


@styled()
def roc(
    false_positive: Sequence[float],
    true_positive: Sequence[float],
    area: float | None = None,
    sites: Sequence[Json] = (),
    point: tuple[float, float] | None = None,
    point_words: str = "",
    whose: str = "all sites",
) -> Figure:
    """`sites`: {"fpr", "tpr"} each, thin behind the whole; `point`: where the model would be used."""
    figure, axes = unit_square("1 − specificity", "Sensitivity")
    axes.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    words = "single sites" + (f" (the first {MOST_LINES})" if len(sites) > MOST_LINES else "")
    for nth, site in enumerate(sites[:MOST_LINES]):
        across, upward = thinned(site["fpr"], site["tpr"])
        axes.plot(across, upward, color=INK, alpha=0.28, linewidth=0.8, label=None if nth else words)
    axes.plot(false_positive, true_positive, color=PALETTE[0], linewidth=2.2, label=_with_area(whose, area))
    _mark(axes, point, point_words)
    axes.legend(loc="lower right")
    return figure


@styled()
def precision_recall(
    recall: Sequence[float],
    precision: Sequence[float],
    area: float | None = None,
    prevalence: float | None = None,
    point: tuple[float, float] | None = None,
    whose: str = "all sites",
) -> Figure:
    figure, axes = unit_square("Sensitivity (recall)", "Precision")
    if prevalence is not None:
        words = f"no skill: {100 * prevalence:.1f} % are positive"
        axes.axhline(prevalence, color=INK, alpha=0.5, linewidth=1, linestyle=":", label=words)
    axes.plot(recall, precision, color=PALETTE[0], linewidth=2.2, label=_with_area(whose, area))
    _mark(axes, point, "" if point is None else f"precision {100 * point[1]:.0f} % there")
    high = prevalence is not None and prevalence > 0.45
    axes.legend(loc="lower left" if high or area is None or area > 0.6 else "upper right")
    return figure


@styled()
def reliability(bins: Sequence[tuple[float, float, float]]) -> Figure:
    """(confidence, accuracy, count) a bin: a dot with its 95 % interval, and below it how many examples it stands for."""
    from matplotlib.figure import Figure as Blank

    figure = Blank(figsize=HALF, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
    filled = [one for one in bins if one[2] > 0]
    confidences, accuracies = [one[0] for one in filled], [one[1] for one in filled]
    upper.scatter(confidences, accuracies, s=30, color=PALETTE[0], linewidths=0, zorder=3)
    upper.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    for confidence, accuracy, count in filled:
        upper.plot([confidence] * 2, wilson(accuracy, count), color=PALETTE[0], alpha=0.45, linewidth=2.5)
    low = min((one[0] for one in filled), default=0.0)
    upper.set_xlim(max(-0.02, low - 0.08), 1.02)
    upper.set_ylim(-0.03, 1.03)
    upper.set_ylabel("Accuracy")
    lower.bar(confidences, [one[2] for one in filled], 0.028, color=PALETTE[0], alpha=0.7)
    lower.set_ylabel("Examples")
    lower.set_xlabel("Confidence")
    lower.yaxis.set_major_formatter("{x:,.0f}")
    lower.locator_params(axis="y", nbins=2)
    return figure


def thinned(across: Sequence[float], upward: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS of a rising curve, its ends among them: more would only make the page heavy."""
    step = max(1, math.ceil((len(across) - 1) / (MOST_POINTS - 1)))
    kept = sorted({*range(0, len(across), step), len(across) - 1})
    return [across[at] for at in kept], [upward[at] for at in kept]


def wilson(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share of so many examples."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half


def unit_square(across: str, upward: str, size: tuple[float, float] = HALF) -> tuple[Figure, Any]:
    figure, axes = new_figure(size)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_box_aspect(0.72)
    axes.set_xlabel(across)
    axes.set_ylabel(upward)
    return figure, axes


def _with_area(words: str, area: float | None) -> str:
    return words if area is None else f"{words}, area {area:.3f}"


def _mark(axes: Any, point: tuple[float, float] | None, words: str) -> None:
    if point is not None:
        axes.plot(*point, marker="o", markersize=7, markeredgewidth=1.8, markeredgecolor=PALETTE[3],
                  markerfacecolor="none", linestyle="", label=words, zorder=5)  # fmt: skip
