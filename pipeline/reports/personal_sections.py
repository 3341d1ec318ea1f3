"""The section of a run's report about sites that have models of their own: what these gain over the common one, and over none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.reports.gains import alike_words, all_alike, gain_words, gains_of
from pipeline.reports.lens import Lens, interval_in
from pipeline.reports.page import Cell, Column
from pipeline.reports.personal_figures import Personal, against, dumbbells
from pipeline.reports.record import Json, Record, number, site_values, view
from pipeline.reports.sheet import Sheet
from pipeline.reports.words import PERCENT, SPLITS, UNDEFINED, points, score, whole

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
