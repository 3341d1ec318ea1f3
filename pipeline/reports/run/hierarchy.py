"""The section of a run's report about models at several levels: each on its sites' own data, and on everybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.document.formatting import PERCENT, SPLITS, UNDEFINED, points, score
from pipeline.reports.document.page import Cell, Column, Sheet
from pipeline.reports.run import curves as figures
from pipeline.reports.run.curves import Series
from pipeline.reports.run.headline_metric import RANKED, Lens
from pipeline.reports.run.record import Json, Record, number, site_values, view

SPECIAL, GENERAL = "Specialisation", "Generalisation"
WORDS: Mapping[str, tuple[str, str]] = {  # level -> its name, its colour
    "site": ("Sites' models", PALETTE[0]),
    "group": ("Groups' models", PALETTE[2]),
    "top": ("Common model", PALETTE[1]),
}


@dataclass(frozen=True)
class Level:
    special: float | None  # on the data of the sites that it is for
    general: float | None  # on everybody's, at the coordinator

    @property
    def known(self) -> bool:
        return self.special is not None or self.general is not None


def levels(sheet: Sheet, record: Record, lens: Lens) -> None:
    split, scores = record.scores()
    turn = (record.results or {}).get("best_round", record.last_round)
    members: Json = next((line.get("groups") or {} for line in record.rounds if line["round"] == turn), {})
    metric = lens.metric
    now = levels_of(scores, members, metric)
    if not any(level.general is not None for name, level in now.items() if name != "top"):
        return
    sheet.page.section("Specialisation and generalisation").text(*_words(now, metric, _skewed(record)))
    _table(sheet, now, lens, metric, split)
    _curves(sheet, record, lens, metric)


def _skewed(record: Record) -> bool:
    chosen = record.settings.get("skew") or "none"
    return (chosen.get("name") if isinstance(chosen, Mapping) else chosen) != "none"


def levels_of(scores: Json, members: Mapping[str, str], metric: str) -> dict[str, Level]:
    """`members`: site -> its lowest group; the models of groups in between are left out. Empty without further models."""
    models: Json = scores.get("models") or {}
    own = {name: found for name, found in models.items() if name.startswith("site/")}
    lowest = {f"group/{group}" for group in members.values()}
    grouped = {name: found for name, found in models.items() if name.startswith("group/")}
    used = {name: found for name, found in grouped.items() if name in lowest} or grouped
    by_group = view(scores, "group") or ({} if own else scores)  # without models of their own, sites use their group's
    found = {
        "site": Level(_special(scores, metric), _mean(own, metric)) if own else Level(None, None),
        "group": Level(_special(by_group, metric), _mean(used, metric)) if used else Level(None, None),
        "top": Level(_special(view(scores, "global"), metric), number((scores.get("coordinator") or {}).get(metric))),
    }
    return {name: level for name, level in found.items() if level.known} if models else {}


def _special(scores: Json, metric: str) -> float | None:
    """Pooled; but scores of several models cannot be put in one order."""
    if metric in RANKED:
        return _mean(scores.get("sites") or {}, metric)
    return number((scores.get("pooled") or {}).get(metric))


def _mean(models: Json, metric: str) -> float | None:
    values = site_values(models, metric)
    return fmean(values.values()) if values else None


def _words(now: Mapping[str, Level], metric: str, skewed: bool) -> list[str]:
    words = (
        f"{SPECIAL}: how well a model does on the data of the sites that it is for. {GENERAL}: how well it does on the "
        f"coordinator's set, which belongs to no site{' and is not skewed' if skewed else ''}."
    )
    known = [(WORDS[name][0], level.special, level.general) for name, level in now.items()]
    special = max(((value, name) for name, value, _ in known if value is not None), default=None)
    general = max(((value, name) for name, _, value in known if value is not None), default=None)
    if special is None or general is None or len(now) < 2:
        return [words]
    first = f"Best at specialising: {_lower(special[1])}, {score(metric, special[0])}"
    return [words, f"{first}; at generalising: {_lower(general[1])}, {score(metric, general[0])}."]


def _lower(words: str) -> str:
    return words[:1].lower() + words[1:]


def _table(sheet: Sheet, now: Mapping[str, Level], lens: Lens, metric: str, split: str) -> None:
    rows: list[list[Cell]] = []
    for name, level in now.items():
        gap = UNDEFINED
        if level.special is not None and level.general is not None:
            gap = points(level.special - level.general)
        rows.append([WORDS[name][0], score(metric, level.special), score(metric, level.general), gap])
    columns = [Column("Level"), Column(SPECIAL, True), Column(GENERAL, True), Column("Difference, points", True)]
    how = "mean over sites" if metric in RANKED else "pooled over sites"
    caption = f"{lens.name(metric)} on {SPLITS[split]} data. {SPECIAL}: {how}; {_lower(GENERAL)}: mean over the models."
    sheet.page.table(columns, rows, caption)


def _curves(sheet: Sheet, record: Record, lens: Lens, metric: str) -> None:
    split = record.best_split()
    found = {
        int(line["round"]): levels_of(scores, line.get("groups") or {}, metric)
        for line in record.rounds
        if (scores := (line.get("metrics") or {}).get(split))
    }
    special = _series({turn: {n: level.special for n, level in now.items()} for turn, now in found.items()})
    general = _series({turn: {n: level.general for n, level in now.items()} for turn, now in found.items()})
    limits = _limits([*special, *general], metric in PERCENT)
    for key, title, series in (("specialisation", SPECIAL, special), ("generalisation", GENERAL, general)):
        if any(len(one.rounds) > 1 for one in series):
            named = f"{title}: {lens.short(metric)}"
            drawn = figures.curves(series, named, percent=metric in PERCENT, limits=limits)
            whose = "the data of the sites that a model is for" if series is special else "the coordinator's set"
            sheet.draw(key, drawn, f"{title}: {lens.name(metric)} on {whose}, {SPLITS[split]} examples, by round.")


def _series(by_round: Mapping[int, Mapping[str, float | None]]) -> list[Series]:
    found = []
    several = len({name for now in by_round.values() for name in now}) > 1
    for name, (words, colour) in WORDS.items():
        known = [(turn, value) for turn, now in sorted(by_round.items()) if (value := now.get(name)) is not None]
        if known:
            turns, values = [turn for turn, _ in known], [value for _, value in known]
            found.append(Series(words, turns, values, dashed=several and name == "group", colour=colour))
    return found


def _limits(series: Sequence[Series], percent: bool) -> tuple[float, float] | None:
    """The same for both drawings, so that they can be compared."""
    values = [value for one in series for value in one.values]
    if not values:
        return None
    pad = 0.05 * (max(values) - min(values)) or 0.01
    scale = 100 if percent else 1
    return scale * max(0.0, min(values) - pad), scale * min(1.0, max(values) + pad)
