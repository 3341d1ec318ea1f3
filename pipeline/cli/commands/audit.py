"""`hemofed audit`: writes what a run promised, spent and disclosed as HTML, PDF and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from pipeline.cli.output import build_table, console, print_json, stderr_console
from pipeline.coordinator.run_folder import RunFolder


def audit_command(run: Path, attack: bool, out: Path | None, data: Path | None, json: bool) -> None:
    """Writes all files first; exit code 1 if the audit found problems."""
    from privacy.audit.collect import collect_facts
    from privacy.audit.write import to_finite_json, write_audit

    folder = RunFolder.open(run)
    if attack:
        from privacy.attacks.run import attack_run

        attack_run(folder, data)
    facts = collect_facts(folder)
    paths = write_audit(facts, folder.path, out or folder.path / "audit")
    if json:
        print_json(to_finite_json(facts))
    else:
        _print_audit(facts)
        for path in paths:
            console.print(f"wrote {path}", soft_wrap=True)
    if not facts["ok"]:
        for problem in facts["problems"]:
            stderr_console.print(f"problem: {problem}", soft_wrap=True)
        raise typer.Exit(1)


def _print_audit(facts: dict[str, Any]) -> None:
    from pipeline.reports.document.blocks import format_epsilon

    rows = [
        [
            site,
            *(
                (
                    format_epsilon(site_facts["budget"]["epsilon"]),
                    format_epsilon(site_facts["spent"]),
                    format_epsilon(site_facts["left"]),
                )
                if site_facts.get("budget")
                else "–––"
            ),
            "none" if not site_facts["ledger"] else "valid" if site_facts["ledger"]["ok"] else "INVALID",
        ]
        for site, site_facts in facts["sites"].items()
    ]
    console.print(build_table(["site", "budget", "spent", "left", "ledger"], rows))
    if not any(facts["protection"].values()):
        console.print("this run has no formal protection: neither differential privacy nor secure aggregation")
