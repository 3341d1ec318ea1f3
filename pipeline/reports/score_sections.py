"""The sections of a run's report about the model as a whole: headline, results by site, learning curves.

Each adds itself to the sheet, or nothing where the run has nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import pstdev

from pipeline.reports import figures
from pipeline.reports.figures import Band, Series
from pipeline.reports.lens import DETECTION, RANKED, Lens, worst_site
from pipeline.reports.page import Cell, Column
from pipeline.reports.record import Json, Record, number, site_values
from pipeline.reports.sheet import COORDINATOR, POOLED, Sheet
from pipeline.reports.svg import PALETTE
from pipeline.reports.words import METRICS, PERCENT, SPLITS, duration, score, shorten, size, whole

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
