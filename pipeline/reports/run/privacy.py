"""The report section on privacy: epsilon spent of each site's budget, or a note that the run is unprotected."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

from pipeline.reports.document.formatting import UNDEFINED_TEXT, format_integer
from pipeline.reports.document.page import ReportWriter, TableCell, TableColumn
from pipeline.reports.run.record import JsonObject, RunRecord, finite_or_none, load_json_object

UNPROTECTED_TEXT = (
    "This run has no formal privacy protection: neither differential privacy nor secure aggregation. Images stayed at the "
    "sites, but what a model or an update reveals about a single person is not bounded."
)
AUDIT_HINT = "For what this covers, its limits and the verification of the ledgers, run hemofed audit."


def add_privacy_section(writer: ReportWriter, record: RunRecord) -> None:
    if not record.round_records:
        return
    privacy_record = load_json_object(record.folder / "privacy.json")
    plans_by_site: JsonObject = privacy_record.get("dp_sgd") or {}
    client_level_dp, secure_aggregation = (
        privacy_record.get("client_level_dp"),
        privacy_record.get("secure_aggregation"),
    )
    writer.page.add_section("Privacy")
    if not (plans_by_site or client_level_dp or secure_aggregation):
        writer.page.add_text(UNPROTECTED_TEXT)
        return
    sentences = []
    if plans_by_site:
        unit = next(iter(plans_by_site.values()))["privacy_unit"]
        sentences.append(
            f"Differential privacy at the sites, with the {unit} as unit: DP-SGD, charged to each site's ledger."
        )
        if unit == "example":
            sentences.append("A person with many images gets almost no protection from this.")
    if client_level_dp:
        sentences.append(
            f"Client-level differential privacy, with noise added by the coordinator: epsilon {client_level_dp['epsilon']:.2f} at delta "
            f"{client_level_dp['delta']:g} after {client_level_dp['rounds']} rounds. It does not protect against the coordinator itself."
        )
    if secure_aggregation:
        sentences.append(
            f"Secure aggregation: the coordinator saw sums over at least {secure_aggregation['threshold']} sites, not single updates."
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


def _site_privacy_row(site: str, plan: JsonObject, record: RunRecord) -> list[TableCell]:
    epsilon_spent = next(
        (
            epsilon_by_site[site]
            for round_record in reversed(record.round_records)
            if site in (epsilon_by_site := round_record.get("epsilon") or {})
        ),
        None,
    )
    num_rounds_declined = sum(
        (round_record.get("failures") or {}).get(site, {}).get("kind") == "privacy_budget"
        for round_record in record.round_records
    )
    return [
        site,
        _format_epsilon(finite_or_none(epsilon_spent)),
        _format_epsilon(_read_epsilon_budget(record.folder, site)),
        f"{plan['delta']:g}",
        f"{plan['noise_multiplier']:.3f}",
        format_integer(plan["num_units"]),
        format_integer(num_rounds_declined),
    ]


def _format_epsilon(epsilon: float | None) -> str:
    return UNDEFINED_TEXT if epsilon is None else f"{epsilon:.2f}"


def _read_epsilon_budget(run_folder: Path, site: str) -> float | None:
    """The budget in the site's ledger, which is read without verification (`hemofed audit` verifies it)."""
    homes_file = run_folder / "homes.json"
    homes_folder = Path(json.loads(homes_file.read_text("utf-8"))) if homes_file.exists() else run_folder / "homes"
    ledger_path = homes_folder / quote(site, safe="") / "ledger.jsonl"
    epsilon_budget = None
    for ledger_line in ledger_path.read_text("utf-8", "replace").splitlines() if ledger_path.is_file() else ():
        try:
            entry = json.loads(ledger_line)
            match entry["kind"]:
                case "opened":
                    epsilon_budget = finite_or_none(entry["body"]["budget"]["epsilon"])
                case "budget":
                    epsilon_budget = finite_or_none(entry["body"]["epsilon"])
        except (ValueError, KeyError, TypeError):
            continue
    return epsilon_budget
