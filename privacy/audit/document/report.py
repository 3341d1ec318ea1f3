"""A run's whole audit: the officer's page, what left the sites, attacks, forms, budgets, sites, fingerprints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.reports.document.blocks import Block, Chapter, Drawing, Report, Table, Words, answers, eps
from pipeline.reports.document.formatting import whole
from pipeline.reports.document.page import Cell, Column
from privacy.audit.document.attack_chapter import attacks
from privacy.audit.document.dpia_forms import forms
from privacy.audit.document.figures import MOST_BARS, budgets
from privacy.audit.document.officer_page import officer
from privacy.audit.document.site_chapters import site_chapter

Json = Mapping[str, Any]
MOST_SITES = 24  # that get a page of their own; all are in audit.json


def report(facts: Json, run: Path) -> Report:
    """`run`: the folder, where the pictures of attacks lie."""
    study = facts["study"]
    notice = "" if facts["ok"] else f"This run is not in order: {_some(facts['problems'])}."
    written = facts["written"].replace("T", " ").replace("+00:00", " UTC")
    subtitle = f"Run {facts['run']} · plan {study['hash'][:16]} · written {written}"
    chapters = [officer(facts), _left(facts), attacks(facts, run), forms(facts), *_sites(facts), _origin(facts)]
    return Report(f"Privacy audit of {study['name']}", subtitle, notice, chapters)


def _some(problems: list[str]) -> str:
    rest = len(problems) - 4
    return "; ".join(problems[:4]) + (f"; and {rest} more, see audit.json" if rest > 0 else "")


def _left(facts: Json) -> Chapter:
    words = "All that travels from a site, and what a run folder holds besides. Nothing else leaves a site; images never do."
    columns = [
        Column("What"),
        Column("Who learns it", words=True),
        Column("About whom"),
        Column("Protected by", words=True),
    ]
    rows: list[list[Cell]] = [
        [(row["what"], row["detail"]), row["whom"], row["about"], row["mechanism"]] for row in facts["disclosures"]
    ]
    return Chapter(
        "What left the sites", [Words([words]), Table(columns, rows, widths=(0.33, 0.19, 0.14, 0.34))], page=True
    )


def _sites(facts: Json) -> Iterator[Chapter]:
    sites = facts["sites"]
    with_budget = {site: found for site, found in sites.items() if found.get("budget")}
    blocks: list[Block] = []
    if len(with_budget) > 1:
        caption = "Epsilon spent at each site, of its budget, over all studies on its data."
        more = f" The first {MOST_BARS} sites." if len(with_budget) > MOST_BARS else ""
        blocks.append(Drawing("budgets", budgets(with_budget), caption + more))
    if any(found["ledger"] for found in sites.values()):
        yield Chapter("Budgets and ledgers", [*blocks, _overview(sites)], page=bool(blocks))
    if facts["protection"]["at_site"] and len(sites) <= MOST_SITES:
        for number, (site, found) in enumerate(sites.items()):
            yield site_chapter(number, site, found, facts)


def _overview(sites: Mapping[str, Json]) -> Table:
    amounts = [Column(title, True) for title in ("Budget", "Spent", "Left", "Rounds", "Sat out")]
    rows = [_overview_row(site, found) for site, found in sites.items()]
    widths = (0.22, 0.11, 0.1, 0.1, 0.1, 0.1, 0.1, 0.17)
    return Table([Column("Site"), Column("Unit"), *amounts, Column("Ledger")], rows, widths=widths)


def _overview_row(site: str, found: Json) -> list[Cell]:
    ledger, took, budget = found["ledger"], found["took"], found.get("budget")
    verdict = "none" if not ledger else "verifies" if ledger["ok"] else "does not verify"
    amounts = [eps(budget["epsilon"]), eps(found["spent"]), eps(found["left"])] if budget else ["–"] * 3
    rounds = [whole(len(took["counted"])), whole(len(took["sat_out"]))]
    return [site, str(found.get("unit") or "–"), *amounts, *rounds, verdict]


def _origin(facts: Json) -> Chapter:
    study, software = facts["study"], facts["software"]
    rows = [
        ("Plan", f"{study['hash']} (SHA-256 of all settings that decide the result)"),
        ("Data", str(facts["data"]["fingerprint"] or "unknown")),
        ("Run with", _listed(software["run"]) or "unknown: the run has not finished"),
        ("Audited with", _listed(software["audit"])),
        (
            "Privacy settings",
            "; ".join(f"{part}: {_listed(given)}" for part, given in study["privacy"].items()) or "none",
        ),
    ]
    if masked := facts["protection"]["secure_sum"]:
        rows.append(("Keys on the secure sum's roster", _listed(masked["fingerprints"])))
    return Chapter("Fingerprints of software and data", [answers(rows)])


def _listed(values: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
