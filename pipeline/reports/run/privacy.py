"""A run's report on privacy, in short: epsilon spent of each site's budget, or that nothing is protected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.core.errors import RunFolderError
from pipeline.protocol.messages import BUDGET_DECLINE_PREFIX
from pipeline.reports.document.formatting import UNDEFINED_TEXT, format_integer
from pipeline.reports.document.page import ReportWriter, TableCell, TableColumn
from pipeline.reports.run.record import JsonObject, RunRecord, finite_or_none

UNPROTECTED_TEXT = (
    "Nothing protects the people behind the images: updates and models carry neither noise nor masks. Images stayed at "
    "the sites; what a model or an update tells of a single person is not bounded."
)
AUDIT_HINT = "What that means, what it leaves out and whether the ledgers verify: hemofed audit."


def add_privacy_section(writer: ReportWriter, record: RunRecord) -> None:
    if not record.round_records:
        return
    privacy_record = _read_json_object(record.folder / "privacy.json")
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
        unit = next(iter(plans_by_site.values()))["unit"]
        sentences.append(
            f"Differential privacy at the sites, with the {unit} as unit: DP-SGD, charged to each site's ledger."
        )
        if unit == "example":
            sentences.append("A person with many images is promised next to nothing by this.")
    if client_level_dp:
        sentences.append(
            f"Differential privacy of whole sites, by noise at the coordinator: epsilon {client_level_dp['epsilon']:.2f} at delta "
            f"{client_level_dp['delta']:g} after {client_level_dp['turns']} rounds. The coordinator itself is not held off by it."
        )
    if secure_aggregation:
        sentences.append(
            f"Secure sums: the coordinator saw sums over at least {secure_aggregation['threshold']} sites, no single update."
        )
    if not plans_by_site and not client_level_dp:
        sentences.append("Without noise the sums and the models are not protected themselves.")
    writer.page.add_text(" ".join([*sentences, AUDIT_HINT]))
    if plans_by_site:
        columns = [
            TableColumn("Site"),
            *(TableColumn(title, True) for title in ("Spent", "Budget", "Delta", "Noise", "Units", "Sat out")),
        ]
        caption = "Epsilon spent on each site's data, over all studies, of its budget; noise in clipping norms"
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
        str((round_record.get("missed") or {}).get(site, "")).startswith(BUDGET_DECLINE_PREFIX)
        for round_record in record.round_records
    )
    return [
        site,
        _format_epsilon(finite_or_none(epsilon_spent)),
        _format_epsilon(_read_epsilon_budget(record.folder, site)),
        f"{plan['delta']:g}",
        f"{plan['noise']:.3f}",
        format_integer(plan["units"]),
        format_integer(num_rounds_declined),
    ]


def _format_epsilon(epsilon: float | None) -> str:
    return UNDEFINED_TEXT if epsilon is None else f"{epsilon:.2f}"


def _read_epsilon_budget(run_folder: Path, site: str) -> float | None:
    """As the site's ledger has it now; `hemofed audit` checks the ledger, this only reads it."""
    homes_file = run_folder / "homes.json"
    homes_folder = Path(json.loads(homes_file.read_text("utf-8"))) if homes_file.exists() else run_folder / "homes"
    ledger_path = homes_folder / quote(site, safe="") / "ledger.jsonl"
    epsilon_budget = None
    for ledger_line in ledger_path.read_text("utf-8", "replace").splitlines() if ledger_path.is_file() else ():
        try:
            entry = json.loads(ledger_line)
            match entry["kind"]:
                case "open":
                    epsilon_budget = finite_or_none(entry["body"]["budget"]["epsilon"])
                case "budget":
                    epsilon_budget = finite_or_none(entry["body"]["epsilon"])
        except (ValueError, KeyError, TypeError):
            continue
    return epsilon_budget


def _read_json_object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}; restore what the run wrote") from error
    return content if isinstance(content, dict) else {}
