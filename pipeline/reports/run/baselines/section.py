"""The section of a run's report that holds the federation against its yardsticks."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from pipeline.reports.document.formatting import PERCENT, SPLITS, points, score
from pipeline.reports.document.page import COORDINATOR, POOLED, Cell, Column, Sheet
from pipeline.reports.run import curves as figures
from pipeline.reports.run.baselines.figures import Row, dots, roc_overlay
from pipeline.reports.run.baselines.results import Contender, contenders, shared_metric
from pipeline.reports.run.baselines.text import WHERE, findings
from pipeline.reports.run.curves import Series
from pipeline.reports.run.headline_metric import RANKED, Lens
from pipeline.reports.run.record import Record

MOST_ROWS = 16  # sites in the dot plot: of more, the weakest
LEADING = ("coordinator", "pooled")  # as yardsticks record their curves
Every = Mapping[str, Contender]


def yardsticks(sheet: Sheet, record: Record, lens: Lens) -> None:
    every = contenders(record)
    if not every:
        return
    metric = shared_metric(every, lens)
    rows = _rows(every, metric)
    if not any(row.values for row in rows):
        return
    sheet.page.section("What federation gains and loses").findings(findings(every, lens, metric))
    hidden = len(every["federated"].sites(metric)) - sum(not row.whole for row in rows)
    sheet.draw("yardsticks", dots(rows, every.values(), lens.name(metric), metric in PERCENT), _caption(rows, hidden))
    _table(sheet, every, lens, metric)
    overlaid = _roc(sheet, every)
    _curves(sheet, record, lens, every, wide=not overlaid)


def _rows(every: Every, metric: str) -> list[Row]:
    """All together first, then the sites, the federation's weakest first."""
    ours = every["federated"]
    wholes = {key: value for key, one in every.items() if (value := one.whole(metric)) is not None}
    words = POOLED if ours.where == "pooled" else COORDINATOR
    first = Row(words, wholes, ours.interval(metric), whole=True)
    names = dict.fromkeys(site for one in every.values() for site in one.sites(metric))
    federated = ours.sites(metric)
    weakest = sorted(names, key=lambda site: federated.get(site, 2.0))[:MOST_ROWS]
    return [first, *(Row(site, _at(every, metric, site), ours.interval(metric, site)) for site in weakest)]


def _at(every: Every, metric: str, site: str) -> dict[str, float]:
    return {key: values[site] for key, one in every.items() if site in (values := one.sites(metric))}


def _caption(rows: list[Row], hidden: int) -> str:
    words = "On test data; further right is better. Sites are ordered by the federated score, the weakest on top"
    words += f"; the {hidden} strongest are left out." if hidden > 0 else "."
    if any(row.interval for row in rows):
        words += " The pale bar is the federated score's interval."
    return words


def _table(sheet: Sheet, every: Every, lens: Lens, metric: str) -> None:
    gapped = any(one.whole(metric) is not None for one in every.values() if one.key != "central")
    central = every["central"].whole(metric) if "central" in every and gapped else None
    shown = [one for one in every.values() if one.whole(metric) is not None or one.sites(metric)]
    by_site = any(one.sites(metric) for one in shown)
    rows: list[list[Cell]] = []
    for one in shown:
        value, worst = one.whole(metric), one.worst(metric)
        row: list[Cell] = [(one.look.label, one.look.words), lens.cell(metric, value, one.interval(metric))]
        if by_site:
            lowest = score(metric, one.sites(metric)[worst]) if worst else score(metric, None)
            row += [score(metric, one.mean(metric)), (lowest, worst or "")]
        if central is not None:
            row.append(points(value - central) if value is not None and one.key != "central" else "–")
        rows.append(row)
    columns = [Column("Training"), Column(POOLED if every["federated"].where == "pooled" else COORDINATOR, True)]
    columns += [Column("Mean over sites", True), Column("Weakest site", True)] if by_site else []
    columns += [Column("Gap to one place, points", True)] if central is not None else []
    caption = f"{lens.name(metric)} on test data; a point is a hundredth."
    if metric in RANKED and any(one.several for one in shown):
        alone = "Each site alone has its own model, so there is no pooled value."
        caption += " Several models have no pooled value." if every["federated"].several else f" {alone}"
    sheet.page.table(columns, rows, caption)


def _roc(sheet: Sheet, every: Every) -> bool:
    drawn = [one for one in every.values() if one.roc]
    if len(drawn) < 2:
        return False
    areas = {one.key: one.whole("positive_auroc") or one.whole("auroc") for one in drawn}
    caption = f"ROC curves with their areas, {WHERE[drawn[0].where]}."
    if "local" in every:
        caption += " Sites that train alone have no common curve."
    sheet.draw("yardstick_roc", roc_overlay(drawn, areas), caption)
    return True


def _curves(sheet: Sheet, record: Record, lens: Lens, every: Every, wide: bool) -> None:
    """By what the yardsticks were followed by: accuracy in runs of older versions."""
    metric = next((one.metric for one in every.values() if one.curve), "accuracy")
    split = record.best_split()
    means = [(turn, fmean(values)) for turn, values in record.judged_by_sites(split, metric).items()]
    leading = LEADING if not record.several else () if metric in RANKED else ("pooled",)
    ours = next((found for where in leading if (found := record.judged(split, where, metric))), means)
    lines = {one.key: one.curve for one in every.values()} | {"federated": ours}
    series = [
        Series(
            one.look.label,
            [turn for turn, _ in lines[one.key]],
            [value for _, value in lines[one.key]],
            dashed=one.key != "federated",
            colour=one.look.colour,
        )
        for one in every.values()
        if lines[one.key]
    ]
    if len(series) < 2:
        return
    drawn = figures.curves(series, lens.name(metric), percent=metric in PERCENT, wide=wide)
    caption = f"{lens.name(metric)} on {SPLITS[split]} data by round: how quickly each of them learns."
    if metric in RANKED and lines.get("local"):
        caption += (
            " Where sites have their own models: the mean over sites."
            if record.several
            else " Sites that train alone: the mean over sites."
        )
    sheet.draw("yardstick_curves", drawn, caption)
