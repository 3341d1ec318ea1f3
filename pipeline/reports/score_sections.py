"""The sections of a run's report about the model: results, learning curves, yardsticks, right and wrong.

Each adds itself to the sheet, or nothing where the run has nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from pipeline.reports import figures, score_figures
from pipeline.reports.figures import Band, Series
from pipeline.reports.page import Column
from pipeline.reports.record import Json, Record, number, site_values
from pipeline.reports.sheet import COORDINATOR, POOLED, Sheet
from pipeline.reports.svg import PALETTE
from pipeline.reports.words import METRICS, PERCENT, SPLITS, metric_name, score, whole

WHOLES = (("coordinator", COORDINATOR), ("pooled", POOLED))
BAND_WORDS: Mapping[Band, str] = {
    "68": "The band is one standard deviation over sites (68 %).",
    "95": "The band is 1.96 standard deviations over sites (95 %).",
}


def main_scores(scores: Json) -> tuple[str, Json]:
    """(whose data, metrics): the coordinator's set if it has one, else all sites pooled, else the mean over sites."""
    for where, words in (("coordinator", "coordinator's set"), ("pooled", "all sites")):
        if scores.get(where):
            return words, scores[where]
    by_metric = {metric: site_values(scores.get("sites") or {}, metric).values() for metric in METRICS}
    means = {metric: fmean(values) for metric, values in by_metric.items() if values}
    return ("mean over sites" if means else "", means)


def outcome(sheet: Sheet, record: Record) -> None:
    split, scores = record.scores()
    sites: Json = scores.get("sites") or {}
    rows = [(words, scores[where]) for where, words in WHOLES if scores.get(where)]
    rows += [(site, metrics or {}) for site, metrics in sites.items()]
    if not rows:
        return
    sheet.page.section(f"Results on {SPLITS[split]} data").text(*_outcome_words(record))
    shown = [metric for metric in METRICS if any(number(metrics.get(metric)) is not None for _, metrics in rows)]
    table = [
        [name, whole(number(metrics.get("n"))), *(score(metric, number(metrics.get(metric))) for metric in shown)]
        for name, metrics in rows
    ]
    columns = [Column("Judged on"), Column("Examples", True), *(Column(metric_name(metric), True) for metric in shown)]
    sheet.page.table(columns, table, highlight=_worst_row(record, sites, len(rows)), badge="lowest accuracy")


def _outcome_words(record: Record) -> list[str]:
    results = record.results
    if not results:
        return ["As last judged, before the end of the run."]
    words = f"The model of round {results.get('best_round')}"
    words += f", chosen by {results['chosen_by']}." if results.get("chosen_by") else "."
    if results.get("stopped"):
        words += f" The run ended: {results['stopped']}."
    deviation = number((results.get("spread") or {}).get("accuracy"))
    if deviation is not None:
        words += f" Accuracy differs between sites by a standard deviation of {100 * deviation:.1f} points."
    return [words]


def _worst_row(record: Record, sites: Json, rows: int) -> int | None:
    """The sites are the table's last rows."""
    known = site_values(sites, "accuracy")
    lowest = min(known, key=lambda site: known[site], default="")
    named = str(((record.results or {}).get("worst") or {}).get("site", lowest))
    return rows - len(sites) + list(sites).index(named) if len(sites) > 1 and named in sites else None


def learning(sheet: Sheet, record: Record, band: Band) -> None:
    split = record.best_split()
    drawn = [(metric, _series(record, split, metric)) for metric in ("accuracy", "loss")]
    if not any(series for _, series in drawn):
        return
    sheet.page.section("Learning curves")
    for metric, series in drawn:
        if not series:
            continue
        banded = any(one.deviation is not None for one in series)
        caption = f"{metric_name(metric)} on {SPLITS[split]} data after every round; round 0 is the untrained start."
        figure = figures.curves(series, metric_name(metric), band, percent=metric in PERCENT)
        sheet.draw(metric, figure, f"{caption} {BAND_WORDS[band]}" if banded else caption)


def _series(record: Record, split: str, metric: str) -> list[Series]:
    found = []
    if points := record.judged(split, "coordinator", metric):
        found.append(_line(COORDINATOR, points, PALETTE[0]))
    if by_round := record.judged_by_sites(split, metric):
        found.append(figures.over_sites("Mean over sites", by_round, PALETTE[1]))
    elif points := record.judged(split, "pooled", metric):
        found.append(_line(POOLED, points, PALETTE[1]))
    if found and metric == "accuracy":
        found += [line for name, yard in _yards(record).items() if (line := _yard_line(record, name, yard))]
    return found


def _line(label: str, points: Sequence[tuple[int, float]], colour: str, dashed: bool = False) -> Series:
    return Series(label, [turn for turn, _ in points], [value for _, value in points], dashed=dashed, colour=colour)


def _yards(record: Record) -> Mapping[str, Json]:
    return (record.results or {}).get("yardsticks") or {}


def _yard_line(record: Record, name: str, yard: Json) -> Series | None:
    """Its own curve, or a level line where only the final score is known."""
    curve = [(int(turn), value) for turn, value in yard.get("curve") or () if number(value) is not None]
    level = number(main_scores(yard.get("test") or {})[1].get("accuracy"))
    if not curve and level is not None:
        curve = [(0, level), (record.last_round, level)]
    return _line(f"Yardstick: {name}", curve, figures.yardstick_colour(name), dashed=True) if curve else None


def yardsticks(sheet: Sheet, record: Record) -> None:
    yards = _yards(record)
    if not yards or not record.results:
        return
    tests = {"local": None, "federated": record.results.get("test") or {}, "central": None}
    tests |= {name: yard.get("test") or {} for name, yard in yards.items()}
    known = {name: test for name, test in tests.items() if test}
    wholes = [(where, words) for where, words in WHOLES if any(test.get(where) for test in known.values())]
    sites = list(dict.fromkeys(site for test in known.values() for site in test.get("sites") or {}))
    groups = [words for _, words in wholes] + sites
    scores = {
        name: [number((test.get(where) or {}).get("accuracy")) for where, _ in wholes]
        + [number(((test.get("sites") or {}).get(site) or {}).get("accuracy")) for site in sites]
        for name, test in known.items()
    }
    if not groups:
        return
    sheet.page.section("Against the yardsticks").text(
        "Local: every site trains alone on its own data. Central: one model trained on all data in one place, "
        "which a federation of hospitals cannot do. Federated training should lie above local and near central."
    )
    caption = "Test accuracy of local, federated and central training."
    sheet.draw("yardsticks", figures.yardstick_bars(groups, scores, "Accuracy"), caption)
    rows = [[group, *(score("accuracy", values[at]) for values in scores.values())] for at, group in enumerate(groups)]
    sheet.page.table(
        [Column("Judged on"), *(Column(name.capitalize(), True) for name in scores)], rows, "Test accuracy"
    )


def diagnosis(sheet: Sheet, record: Record) -> None:
    where, main = main_scores((record.results or {}).get("test") or {})
    classes = [str(label) for label in record.data.get("classes") or ()]
    counts, bins = main.get("confusion"), main.get("reliability")
    if not counts and not bins:
        return
    sheet.page.section("What the model gets right and wrong").text(f"Test data: {where}.")
    if counts:
        labels = classes if len(classes) == len(counts) else [str(at) for at in range(len(counts))]
        caption = "Confusion matrix: rows are the truth, columns what the model said; colour is the share of the row."
        sheet.draw("confusion", score_figures.confusion(labels, counts), caption)
    if bins:
        caption = (
            "Reliability: on the dotted line, the model is right as often as it claims to be; "
            "below it, it is too sure of itself. Larger dots stand for more examples."
        )
        sheet.draw("reliability", score_figures.reliability([tuple(one) for one in bins]), caption)
    _detection(sheet, record, main, classes)
    if counts:
        _class_table(sheet, labels, counts)


def _class_table(sheet: Sheet, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
    """Sensitivity = right of the true ones, precision = right of the ones said; undefined where there are none."""
    rows = []
    for at, label in enumerate(labels):
        true, said, right = sum(counts[at]), sum(row[at] for row in counts), counts[at][at]
        shares = [score("accuracy", right / of if of else None) for of in (true, said)]
        rows.append([label, whole(true), *shares])
    columns = [Column("Class"), Column("Examples", True), Column("Sensitivity", True), Column("Precision", True)]
    sheet.page.table(columns, rows, "Class by class")


def _detection(sheet: Sheet, record: Record, main: Json, classes: Sequence[str]) -> None:
    positive = (record.results or {}).get("positive") or (classes[1] if len(classes) == 2 else None)
    if positive is None:
        return
    named = f"class “{positive}” against the rest"
    areas = {name: number(main.get(f"positive_{name}", main.get(name))) for name in ("auroc", "auprc")}
    if (curve := main.get("roc")) and curve.get("fpr"):
        sheet.draw("roc", score_figures.roc(curve["fpr"], curve["tpr"], areas["auroc"]), f"ROC curve: {named}.")
    if (curve := main.get("pr")) and curve.get("recall"):
        drawn = score_figures.precision_recall(curve["recall"], curve["precision"], areas["auprc"])
        sheet.draw("precision_recall", drawn, f"Precision and sensitivity: {named}.")
