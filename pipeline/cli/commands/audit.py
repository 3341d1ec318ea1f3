"""`hemofed audit`: writes what a run promised, spent and disclosed as HTML, PDF and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipeline.cli.output import build_table, console, print_json, stderr_console
from pipeline.coordinator.run_folder import RunFolder

if TYPE_CHECKING:
    from privacy.audit.facts import AuditFacts


def audit_command(run: Path, attack: bool, out: Path | None, data: Path | None, json: bool) -> None:
    """Writes all files first; exit code 1 if the audit found problems."""
    from privacy.audit.collect import collect_facts
    from privacy.audit.write import write_audit

    folder = RunFolder.open(run)
    if attack:
        from privacy.attacks.run import attack_run

        attack_run(folder, data)
    facts = collect_facts(folder)
    paths = write_audit(facts, folder.path, out or folder.path / "audit")
    if json:
        print_json(facts.model_dump(mode="json"))
    else:
        _print_audit(facts)
        for path in paths:
            console.print(f"wrote {path}", soft_wrap=True)
    if not facts.ok:
        for problem in facts.problems:
            stderr_console.print(f"problem: {problem}", soft_wrap=True)
        raise typer.Exit(1)


def _print_audit(facts: AuditFacts) -> None:
    from pipeline.reports.document.blocks import format_epsilon

    rows = []
    for site, site_facts in facts.sites.items():
        ledger, spending = site_facts.ledger, site_facts.spending
        amounts = (
            [format_epsilon(spending.budget.epsilon), format_epsilon(spending.spent), format_epsilon(spending.left)]
            if spending and spending.budget
            else ["–"] * 3
        )
        rows.append([site, *amounts, "none" if not ledger else "valid" if ledger.ok else "INVALID"])
    console.print(build_table(["site", "budget", "spent", "left", "ledger"], rows))
    if not facts.protection.is_any:
        console.print("this run has no formal protection: neither differential privacy nor secure aggregation")
