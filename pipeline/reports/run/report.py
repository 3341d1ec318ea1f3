"""run folder -> report.html and plots/*.png, for a finished run and for one that still goes on."""

from __future__ import annotations

from pathlib import Path

from pipeline.reports.document.formatting import whole
from pipeline.reports.document.page import Page, Sheet
from pipeline.reports.run import sites as site_sections
from pipeline.reports.run.baselines.section import yardsticks
from pipeline.reports.run.clusters.section import groups
from pipeline.reports.run.contact_sheets import cells
from pipeline.reports.run.curves import Band
from pipeline.reports.run.error_analysis import diagnosis
from pipeline.reports.run.headline_metric import Lens
from pipeline.reports.run.hierarchy import levels
from pipeline.reports.run.personalization import personal
from pipeline.reports.run.privacy import privacy
from pipeline.reports.run.record import Record, number, read_run
from pipeline.reports.run.scores import headline, learning, outcome


def write_report(run: Path, band: Band = "68") -> Path:
    record = read_run(run)
    page = Page(record.name, subtitle(record), notice(record))
    sheet = Sheet(page, run / "plots")
    lens = Lens.of(record)
    headline(sheet, record, lens)
    cells(sheet, record, lens)
    yardsticks(sheet, record, lens)
    outcome(sheet, record, lens)
    personal(sheet, record, lens)
    groups(sheet, record, lens)
    levels(sheet, record, lens)
    diagnosis(sheet, record, lens)
    learning(sheet, record, lens, band)
    privacy(sheet, record)
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


__all__ = ["Band", "write_report"]
