"""Writes report.html and plots/*.png for a run folder, of a finished run or one in progress."""

from __future__ import annotations

from pathlib import Path

from pipeline.reports.document.formatting import format_integer
from pipeline.reports.document.page import HtmlPage, ReportWriter
from pipeline.reports.run import sites as site_sections
from pipeline.reports.run.baselines.section import add_baselines_section
from pipeline.reports.run.clusters.section import add_clusters_section
from pipeline.reports.run.contact_sheets import add_contact_sheet_section
from pipeline.reports.run.curves import BandLevel
from pipeline.reports.run.error_analysis import add_error_analysis_section
from pipeline.reports.run.headline_metric import HeadlineMetric
from pipeline.reports.run.hierarchy import add_hierarchy_section
from pipeline.reports.run.personalization import add_personalization_section
from pipeline.reports.run.privacy import add_privacy_section
from pipeline.reports.run.record import RunRecord, load_run_record
from pipeline.reports.run.scores import add_headline_tiles, add_learning_curves_section, add_results_section


def write_report(run_folder: Path, band: BandLevel = "68") -> Path:
    record = load_run_record(run_folder)
    page = HtmlPage(record.name, report_subtitle(record), unfinished_notice(record))
    writer = ReportWriter(page, run_folder / "plots")
    headline = HeadlineMetric.from_record(record)
    add_headline_tiles(writer, record, headline)
    add_contact_sheet_section(writer, record, headline)
    add_baselines_section(writer, record, headline)
    add_results_section(writer, record, headline)
    add_personalization_section(writer, record, headline)
    add_clusters_section(writer, record, headline)
    add_hierarchy_section(writer, record, headline)
    add_error_analysis_section(writer, record, headline)
    add_learning_curves_section(writer, record, headline, band)
    add_privacy_section(writer, record)
    site_sections.add_participation_section(writer, record)
    site_sections.add_data_section(writer, record)
    site_sections.add_communication_section(writer, record)
    site_sections.add_provenance_section(writer, record)
    return page.save(run_folder / "report.html")


def report_subtitle(record: RunRecord) -> str:
    results, strategy, model = record.results, record.strategy_name, record.model_name
    size_text = f" with {format_integer(results.num_parameters)} parameters" if results else ""
    parts = [
        f"Strategy {strategy}" if strategy else "",
        f"model {model}{size_text}" if model else "",
        f"study {results.study_hash[:12]}" if results else "",
    ]
    return " · ".join(part for part in parts if part)


def unfinished_notice(record: RunRecord) -> str:
    if record.results is not None:
        return ""
    if not record.round_records:
        return "This run has not finished: no round is recorded yet."
    return (
        f"This run has not finished: round {record.last_round} is its last so far. "
        "The scores below are those of the last evaluated round, not of the final test, and will change."
    )
