"""Several runs on one page: their curves laid over each other, their scores, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.core.errors import BadRun
from pipeline.reports.document.figure_style import to_svg
from pipeline.reports.document.formatting import (
    METRICS,
    PERCENT,
    SPLITS,
    UNDEFINED,
    duration,
    metric_name,
    score,
    size,
    whole,
)
from pipeline.reports.document.page import Column, Page
from pipeline.reports.run.curves import Series, curves, over_sites
from pipeline.reports.run.headline_metric import main_scores
from pipeline.reports.run.record import SPLIT_ORDER, Json, Record, number, read_run
from pipeline.reports.run.scores import BAND_WORDS

Source = tuple[str, str]  # split, and whose judgement
SOURCE_WORDS: Mapping[str, str] = {
    "coordinator": "as the coordinator judged it",
    "sites": "mean over sites",
    "pooled": "pooled over all sites",
}
SOURCES: Sequence[Source] = [(split, where) for where in SOURCE_WORDS for split in SPLIT_ORDER]


def write_compare(runs: Sequence[Path], out: Path, metric: str = "accuracy") -> tuple[Path, list[dict[str, object]]]:
    """`out`: an .html file, or a folder that gets compare.html. The list is the page's table, in plain numbers."""
    if metric not in METRICS:
        raise BadRun(f"no run records the metric {metric!r}; valid: {', '.join(METRICS)}")
    records = dict(zip(_names(runs), map(read_run, runs), strict=True))
    rows = [_row(name, record, metric) for name, record in records.items()]
    page = Page(
        f"{len(runs)} runs compared" if len(runs) != 1 else "One run",
        f"By {metric_name(metric).lower()}",
        _notice(records),
    )
    page.section("Scores").table(_columns(metric), [_cells(row) for row in rows])
    _overlay(page, records, metric)
    _differences(page, records)
    return page.save(out if out.suffix == ".html" else out / "compare.html"), rows


def _names(runs: Sequence[Path]) -> list[str]:
    """Folder names; with their parents where two folders are called the same."""
    resolved = [run.resolve() for run in runs]
    short = [run.name for run in resolved]
    long = [f"{run.parent.name}/{run.name}" for run in resolved]
    names = [wide if short.count(brief) > 1 else brief for brief, wide in zip(short, long, strict=True)]
    return [
        f"{name} ({names[:at].count(name) + 1})" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]


def _notice(records: Mapping[str, Record]) -> str:
    running = [name for name, record in records.items() if record.results is None]
    return f"Not finished, judged by their last round: {', '.join(running)}." if running else ""


def _row(name: str, record: Record, metric: str) -> dict[str, object]:
    results = record.results or {}
    split, scores = record.scores()
    where, main = main_scores(scores)
    best = number(results.get("best_round"))
    return {
        "name": name,
        "strategy": record.part("strategy"),
        "best_round": None if best is None else int(best),
        "judged_on": f"{SPLITS[split]}, {where}" if where else None,
        **{key: number(main.get(key)) for key in dict.fromkeys([metric, "accuracy", "loss"])},
        "traffic": record.traffic("up") + record.traffic("down"),
        "seconds": record.seconds,
    }


def _columns(metric: str) -> list[Column]:
    scored = [Column(metric_name(key), True) for key in dict.fromkeys([metric, "accuracy", "loss"])]
    return [
        Column("Run"),
        Column("Strategy"),
        Column("Best round", True),
        Column("Judged on"),
        *scored,
        Column("Traffic", True),
        Column("Time", True),
    ]


def _cells(row: Mapping[str, object]) -> list[str]:
    return [_cell(key, value) for key, value in row.items()]


def _cell(key: str, value: object) -> str:
    if not isinstance(value, int | float):
        return str(value) if value else UNDEFINED
    return score(key, value) if key in METRICS else {"traffic": size, "seconds": duration}.get(key, whole)(value)


def _overlay(page: Page, records: Mapping[str, Record], metric: str) -> None:
    found = {name: _drawable(record, metric) for name, record in records.items()}
    found = {name: sources for name, sources in found.items() if sources}
    if not found:
        page.section("Curves").text(f"No run has recorded {metric_name(metric).lower()} by round.")
        return
    shared = next((source for source in SOURCES if all(source in sources for sources in found.values())), None)
    series = [_curve(name, records[name], shared or sources[0], metric) for name, sources in found.items()]
    words = f"{metric_name(metric)} after every round"
    if shared:
        words += f" on {SPLITS[shared[0]]} data, {SOURCE_WORDS[shared[1]]}."
    else:
        kinds = (f"{name}: {SPLITS[split]} data, {SOURCE_WORDS[where]}" for name, [(split, where), *_] in found.items())
        words += f". The runs were not judged alike: {'; '.join(kinds)}."
    if any(one.deviation is not None for one in series):
        words += f" {BAND_WORDS['68']}"
    drawn = curves(series, metric_name(metric), percent=metric in PERCENT, wide=True)
    page.section("Curves").figure(to_svg(drawn, "curves"), words, wide=True)


def _drawable(record: Record, metric: str) -> list[Source]:
    """What this run can be drawn by, best first: a source judged in one round only is no curve if there is another."""
    lengths = {
        (split, where): len(
            record.judged_by_sites(split, metric) if where == "sites" else record.judged(split, where, metric)
        )
        for split, where in SOURCES
    }
    curved = [source for source in SOURCES if lengths[source] > 1]
    return curved or [source for source in SOURCES if lengths[source]]


def _curve(name: str, record: Record, source: Source, metric: str) -> Series:
    split, where = source
    if where == "sites":
        return over_sites(name, record.judged_by_sites(split, metric))
    points = record.judged(split, where, metric)
    return Series(name, [turn for turn, _ in points], [value for _, value in points])


def _differences(page: Page, records: Mapping[str, Record]) -> None:
    flat = {name: flatten(record.settings) for name, record in records.items()}
    keys = list(dict.fromkeys(key for settings in flat.values() for key in settings))
    differing = [key for key in keys if len({settings.get(key) for settings in flat.values()}) > 1]
    page.section("Settings that differ")
    if not differing:
        page.text("None: the study files say the same.")
        return
    rows = [[key, *(settings.get(key, UNDEFINED) for settings in flat.values())] for key in differing]
    page.table([Column("Setting"), *map(Column, records)], rows)


def flatten(settings: Json, prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat
