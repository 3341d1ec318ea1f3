"""The audit report: the officer's page, disclosures, attacks, drafts for the DPIA, budgets, sites, fingerprints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.reports.document.blocks import (
    FigureBlock,
    ReportBlock,
    ReportChapter,
    ReportDocument,
    TableBlock,
    TextBlock,
    format_epsilon,
    question_table,
)
from pipeline.reports.document.formatting import format_integer
from pipeline.reports.document.page import TableCell, TableColumn
from privacy.audit.document.attack_chapter import build_attack_chapter
from privacy.audit.document.dpia_forms import build_dpia_chapter
from privacy.audit.document.figures import MAX_BARS, plot_budgets
from privacy.audit.document.officer_page import build_officer_chapter
from privacy.audit.document.site_chapters import build_site_chapter
from privacy.audit.facts import AuditFacts, SiteFacts

MAX_SITE_CHAPTERS = 24  # with more sites none gets its own chapter; all are in audit.json


def build_report(facts: AuditFacts, run_folder: Path) -> ReportDocument:
    """`run_folder` holds the images of attacks."""
    study = facts.study
    notice = "" if facts.ok else f"This run is not in order: {_summarize_problems(facts.problems)}."
    written_at = facts.written.replace("T", " ").replace("+00:00", " UTC")
    subtitle = f"Run {facts.run} · study hash {study.hash[:16]} · written {written_at}"
    chapters = [
        build_officer_chapter(facts),
        _disclosure_chapter(facts),
        build_attack_chapter(facts, run_folder),
        build_dpia_chapter(facts),
        *_site_chapters(facts),
        _fingerprint_chapter(facts),
    ]
    return ReportDocument(f"Privacy audit of {study.name}", subtitle, notice, chapters)


def _summarize_problems(problems: Sequence[str]) -> str:
    num_more = len(problems) - 4
    return "; ".join(problems[:4]) + (f"; and {num_more} more, see audit.json" if num_more > 0 else "")


def _disclosure_chapter(facts: AuditFacts) -> ReportChapter:
    text = (
        "Everything that a site sends, and what a run folder contains in addition. Nothing else leaves a site; images never "
        "leave it."
    )
    columns = [
        TableColumn("What"),
        TableColumn("Who learns it", is_text=True),
        TableColumn("About whom"),
        TableColumn("Protected by", is_text=True),
    ]
    rows: list[list[TableCell]] = [
        [
            (row.content, f"{row.detail} ({row.when})" if row.detail else row.when),
            row.receiver,
            row.subjects,
            row.reason,
        ]
        for row in facts.disclosures
    ]
    return ReportChapter(
        "What left the sites",
        [TextBlock([text]), TableBlock(columns, rows, column_shares=(0.33, 0.19, 0.14, 0.34))],
        starts_new_page=True,
    )


def _site_chapters(facts: AuditFacts) -> Iterator[ReportChapter]:
    sites = facts.sites
    with_budget = {
        site: site_facts.spending for site, site_facts in sites.items() if site_facts.spending and site_facts.budget
    }
    blocks: list[ReportBlock] = []
    if len(with_budget) > 1:
        caption = "Epsilon spent at each site over all studies on its data, and its budget."
        more_text = f" Only the first {MAX_BARS} sites are shown." if len(with_budget) > MAX_BARS else ""
        blocks.append(FigureBlock("budgets", plot_budgets(with_budget), caption + more_text))
    if any(site_facts.ledger for site_facts in sites.values()):
        yield ReportChapter("Budgets and ledgers", [*blocks, _overview_table(sites)], starts_new_page=bool(blocks))
    if facts.protection.dp_sgd and len(sites) <= MAX_SITE_CHAPTERS:
        for number, (site, site_facts) in enumerate(sites.items()):
            yield build_site_chapter(number, site, site_facts, facts)


def _overview_table(sites: Mapping[str, SiteFacts]) -> TableBlock:
    amount_columns = [TableColumn(title, True) for title in ("Budget", "Spent", "Left", "Rounds", "Declined")]
    rows = [_overview_row(site, site_facts) for site, site_facts in sites.items()]
    widths = (0.22, 0.11, 0.1, 0.1, 0.1, 0.1, 0.1, 0.17)
    return TableBlock(
        [TableColumn("Site"), TableColumn("Privacy unit"), *amount_columns, TableColumn("Ledger")],
        rows,
        column_shares=widths,
    )


def _overview_row(site: str, site_facts: SiteFacts) -> list[TableCell]:
    ledger, participation, spending = site_facts.ledger, site_facts.participation, site_facts.spending
    ledger_status = "none" if not ledger else "valid" if ledger.ok else "not valid"
    amounts = (
        [format_epsilon(spending.budget.epsilon), format_epsilon(spending.spent), format_epsilon(spending.left)]
        if spending and spending.budget
        else ["–"] * 3
    )
    rounds = [format_integer(len(participation.accepted)), format_integer(len(participation.out_of_budget))]
    return [site, spending.unit if spending else "–", *amounts, *rounds, ledger_status]


def _fingerprint_chapter(facts: AuditFacts) -> ReportChapter:
    study, software = facts.study, facts.software
    rows = [
        ("Study", f"{study.hash} (SHA-256 of all settings that decide the result)"),
        ("Data", str(facts.data.fingerprint or "unknown")),
        ("Run with", _format_versions(software.run) or "unknown: the run has not finished"),
        ("Audited with", _format_versions(software.audit)),
        (
            "Privacy settings",
            "; ".join(f"{section}: {_format_versions(values)}" for section, values in study.privacy.items()) or "none",
        ),
    ]
    if secure_aggregation := facts.protection.secure_aggregation:
        rows.append(("Keys on the roster of secure aggregation", _format_versions(secure_aggregation.fingerprints)))
    return ReportChapter("Fingerprints of software and data", [question_table(rows)])


def _format_versions(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
