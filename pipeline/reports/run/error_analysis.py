"""The section of a run's report about single answers: confusion, certainty, and the trade-off at the positive class."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.reports.document.formatting import score, whole
from pipeline.reports.document.page import Column, Sheet
from pipeline.reports.run import scores as score_figures
from pipeline.reports.run.headline_metric import Lens
from pipeline.reports.run.record import Json, Record, number

Counts = Sequence[Sequence[int]]


def diagnosis(sheet: Sheet, record: Record, lens: Lens) -> None:
    test: Json = lens.fair((record.results or {}).get("test") or {})
    where, main = lens.whole(test)
    classes = [str(label) for label in record.data.get("classes") or ()]
    counts, bins = main.get("confusion"), main.get("reliability")
    if not counts and not bins:
        return
    sheet.page.section("What the model gets right and wrong").text(
        f"Test data: {where}." if not lens.several else f"Test data: {where}, each by the model that it uses."
    )
    labels = classes if len(classes) == len(counts or ()) else [str(at) for at in range(len(counts or ()))]
    _detection(sheet, lens, test, main, labels, where)
    if counts:
        caption = "Confusion matrix: rows are the truth, columns what the model said; colour is the share of the row."
        sheet.draw("confusion", score_figures.confusion(labels, counts), caption)
    if bins:
        caption = (
            "Reliability: on the dotted line, the model is right as often as it claims to be; below it, it is too "
            "sure of itself. Bars are 95 % intervals of a share, as if examples were independent; below, how many examples stand behind each dot."
        )
        sheet.draw("reliability", score_figures.reliability([tuple(one) for one in bins]), caption)
    if counts:
        _class_table(sheet, labels, counts, main.get("class_auroc") or ())


def _class_table(sheet: Sheet, labels: Sequence[str], counts: Counts, areas: Sequence[float | None]) -> None:
    """Sensitivity = right of the true ones, precision = right of the ones said; undefined where there are none."""
    rows = []
    for at, label in enumerate(labels):
        true, said, right = sum(counts[at]), sum(row[at] for row in counts), counts[at][at]
        shares = [score("accuracy", right / of if of else None) for of in (true, said)]
        rows.append([label, whole(true), *shares, *([score("auroc", number(areas[at]))] if areas else [])])
    columns = [Column("Class"), Column("Examples", True), Column("Sensitivity", True), Column("Precision", True)]
    sheet.page.table([*columns, *([Column("AUROC", True)] if areas else [])], rows, "Class by class")


def _detection(sheet: Sheet, lens: Lens, test: Json, main: Json, labels: Sequence[str], whose: str) -> None:
    positive = lens.positive or (labels[1] if len(labels) == 2 else None)
    if positive is None:
        return
    named = f"class “{positive}” against the rest"
    areas = {name: number(main.get(f"positive_{name}", main.get(name))) for name in ("auroc", "auprc")}
    point = _operating_point(main.get("roc") or {}, lens.specificity) if lens.positive else None
    if (curve := main.get("roc")) and curve.get("fpr"):
        found = [(metrics or {}).get("roc") for metrics in (test.get("sites") or {}).values()]
        sites = [one for one in found if one and one.get("fpr")]
        asked = f"sensitivity {100 * point[1]:.0f} % at {100 * lens.specificity:g} % specificity" if point else ""
        caption = f"ROC curve: {named}." + (" The ring marks the specificity that the study asks for." if point else "")
        sheet.draw(
            "roc", score_figures.roc(curve["fpr"], curve["tpr"], areas["auroc"], sites, point, asked, whose), caption
        )
    if (curve := main.get("pr")) and curve.get("recall"):
        share, at = _prevalence(main.get("confusion") or (), labels, positive), _precision_at(curve, point)
        drawn = score_figures.precision_recall(curve["recall"], curve["precision"], areas["auprc"], share, at, whose)
        caption = f"Precision and sensitivity: {named}." + (" The ring is the same operating point." if at else "")
        sheet.draw("precision_recall", drawn, caption)


def _operating_point(curve: Json, specificity: float) -> tuple[float, float] | None:
    """(1 - specificity, sensitivity): the most that is found among thresholds at least this specific."""
    pairs = zip(curve.get("fpr") or (), curve.get("tpr") or (), strict=True)
    return max(
        (pair for pair in pairs if pair[0] <= 1 - specificity + 1e-12), key=lambda p: (p[1], -p[0]), default=None
    )


def _precision_at(curve: Json, point: tuple[float, float] | None) -> tuple[float, float] | None:
    """The best precision at that sensitivity."""
    if point is None or not point[1]:
        return None
    pairs = zip(curve["recall"], curve["precision"], strict=True)
    return max((pair for pair in pairs if abs(pair[0] - point[1]) < 1e-9), key=lambda p: p[1], default=None)


def _prevalence(counts: Counts, labels: Sequence[str], positive: str) -> float | None:
    total = sum(map(sum, counts))
    return sum(counts[labels.index(positive)]) / total if total and positive in labels else None
