"""The report section on privacy: epsilon spent of each site's budget, or a note that the run is unprotected."""

from __future__ import annotations

import json
import math
from pathlib import Path

from pipeline.protocol.messages import SiteId
from pipeline.records.privacy_record import PrivacyPlanRecord, PrivacyRecord
from pipeline.records.site_homes import SiteHomes
from pipeline.reports.document.formatting import UNDEFINED_TEXT, format_integer
from pipeline.reports.document.page import ReportWriter, TableCell, TableColumn
from pipeline.reports.run.record import RunRecord

UNPROTECTED_TEXT = (
    "This run has no formal privacy protection: neither differential privacy nor secure aggregation. Images stayed at the "
    "sites, but what a model or an update reveals about a single person is not bounded."
)
AUDIT_HINT = "For what this covers, its limits and the verification of the ledgers, run hemofed audit."


def add_privacy_section(writer: ReportWriter, record: RunRecord) -> None:
    if not record.round_records:
        return
    privacy_record = PrivacyRecord.read_if_present(record.folder) or PrivacyRecord()
    plans_by_site, client_level_dp = privacy_record.dp_sgd, privacy_record.client_level_dp
    secure_aggregation = privacy_record.secure_aggregation
    writer.page.add_section("Privacy")
    if not (plans_by_site or client_level_dp or secure_aggregation):
        writer.page.add_text(UNPROTECTED_TEXT)
        return
    sentences = []
    if plans_by_site:
        unit = next(iter(plans_by_site.values())).privacy_unit
        sentences.append(
            f"Differential privacy at the sites, with the {unit} as unit: DP-SGD, charged to each site's ledger."
        )
        if unit == "example":
            sentences.append("A person with many images gets almost no protection from this.")
    if client_level_dp:
        sentences.append(
            f"Client-level differential privacy, with noise added by the coordinator: epsilon {client_level_dp.epsilon:.2f} at delta "
            f"{client_level_dp.delta:g} after {client_level_dp.rounds} rounds. It does not protect against the coordinator itself."
        )
    if secure_aggregation:
        sentences.append(
            f"Secure aggregation: the coordinator saw sums over at least {secure_aggregation.threshold} sites, not single updates."
        )
    if not plans_by_site and not client_level_dp:
        sentences.append("Without noise, the sums and the models themselves are not protected.")
    writer.page.add_text(" ".join([*sentences, AUDIT_HINT]))
    if plans_by_site:
        columns = [
            TableColumn("Site"),
            *(
                TableColumn(title, True)
                for title in ("Spent", "Budget", "Delta", "Noise multiplier", "Units", "Declined rounds")
            ),
        ]
        caption = "Epsilon spent on each site's data over all studies, and its budget"
        writer.page.add_table(
            columns, [_site_privacy_row(site, plans_by_site[site], record) for site in plans_by_site], caption
        )


def _site_privacy_row(site: SiteId, plan: PrivacyPlanRecord, record: RunRecord) -> list[TableCell]:
    records = record.round_records
    epsilon_spent = next((line.epsilon[site] for line in reversed(records) if site in line.epsilon), None)
    num_rounds_declined = sum(
        site in line.failures and line.failures[site].kind == "privacy_budget" for line in records
    )
    return [
        site,
        _format_epsilon(epsilon_spent),
        _format_epsilon(_read_epsilon_budget(record.folder, site)),
        f"{plan.delta:g}",
        f"{plan.noise_multiplier:.3f}",
        format_integer(plan.num_units),
        format_integer(num_rounds_declined),
    ]


def _format_epsilon(epsilon: float | None) -> str:
    return UNDEFINED_TEXT if epsilon is None else f"{epsilon:.2f}"


def _read_epsilon_budget(run_folder: Path, site: str) -> float | None:
    """The budget in the site's ledger, which is read without verification (`hemofed audit` verifies it)."""
    ledger_path = SiteHomes.locate(run_folder).home_path(site) / "ledger.jsonl"
    epsilon_budget = None
    for ledger_line in ledger_path.read_text("utf-8", "replace").splitlines() if ledger_path.is_file() else ():
        try:
            entry = json.loads(ledger_line)
            match entry["kind"]:
                case "opened":
                    epsilon_budget = float(entry["body"]["budget"]["epsilon"])
                case "budget":
                    epsilon_budget = float(entry["body"]["epsilon"])
        except (ValueError, KeyError, TypeError):
            continue
    return epsilon_budget if epsilon_budget is None or math.isfinite(epsilon_budget) else None
