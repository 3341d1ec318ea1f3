"""run folder -> report.html and plots/*.png, for a finished run and for one that still goes on."""

from __future__ import annotations

from pathlib import Path

from pipeline.reports import score_sections, site_sections
from pipeline.reports.figures import Band
from pipeline.reports.page import Page
from pipeline.reports.record import Record, number, read_run
from pipeline.reports.sheet import Sheet
from pipeline.reports.words import SPLITS, duration, metric_name, score, size, whole


def write_report(run: Path, band: Band = "68") -> Path:
    record = read_run(run)
    page = Page(record.name, subtitle(record), notice(record))
    sheet = Sheet(page, run / "plots")
    page.tiles(headline(record))
    score_sections.outcome(sheet, record)
    score_sections.learning(sheet, record, band)
    score_sections.yardsticks(sheet, record)
    score_sections.diagnosis(sheet, record)
    site_sections.participation(sheet, record)
    site_sections.data(sheet, record)
    site_sections.communication(sheet, record)
    site_sections.provenance(sheet, record)
    return page.save(run / "report.html")


def subtitle(record: Record) -> str:
    results = record.results or {}
    parameters = number(results.get("parameters"))
    strategy, model = record.part("strategy"), record.part("model")
    model_words = f"model {model}" + (f" with {whole(parameters)} parameters" if parameters else "")
    parts = [f"Strategy {strategy}" if strategy else "", model_words if model else ""]
    digest = results.get("hash")
    return " · ".join([part for part in parts if part] + ([f"study {str(digest)[:12]}"] if digest else []))


def notice(record: Record) -> str:
    if record.results is not None:
        return ""
    if not record.rounds:
        return "This run has not finished: no round is recorded yet."
    return (
        f"This run has not finished: it stands at round {record.last_round}. "
        "The numbers below are those of the last round judged, not the final test, and will change."
    )


def headline(record: Record) -> list[tuple[str, str]]:
    split, scores = record.scores()
    results = record.results or {}
    where, main = score_sections.main_scores(scores)
    accuracy = score("accuracy", number(main.get("accuracy")))
    label = f"{metric_name('accuracy')}, {SPLITS[split]} ({where})" if where else metric_name("accuracy")
    rounds = number(results.get("rounds"))
    best = number(results.get("best_round"))
    return [
        (label, accuracy),
        ("Best round", whole(best)),
        ("Sites", whole(len(record.sites))),
        ("Rounds", whole(record.last_round if rounds is None else rounds)),
        ("Traffic, both ways", size(record.traffic("up") + record.traffic("down"))),
        ("Time", duration(record.seconds)),
    ]


__all__ = ["Band", "write_report"]
