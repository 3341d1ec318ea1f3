"""`hemofed audit`: what a run promised, spent and gave away, as a page, a PDF and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from pipeline.cli.output import console, errors, print_json, table
from pipeline.coordinator.run_folder import RunFolder


def audit_command(run: Path, attack: bool, out: Path | None, data: Path | None, json: bool) -> None:
    """Ends with exit code 1 if anything is not in order, once all is written."""
    from privacy.audit.collect import collect
    from privacy.audit.write import plain, write_audit

    folder = RunFolder.open(run)
    if attack:
        from privacy.attacks.run import attack_run

        attack_run(folder, data)
    facts = collect(folder)
    paths = write_audit(facts, folder.path, out or folder.path / "audit")
    if json:
        print_json(plain(facts))
    else:
        _show(facts)
        for path in paths:
            console.print(f"wrote {path}", soft_wrap=True)
    if not facts["ok"]:
        for problem in facts["problems"]:
            errors.print(f"not in order: {problem}", soft_wrap=True)
        raise typer.Exit(1)


def _show(facts: dict[str, Any]) -> None:
    from pipeline.reports.document.blocks import eps

    rows = [
        [
            site,
            *(
                (eps(found["budget"]["epsilon"]), eps(found["spent"]), eps(found["left"]))
                if found.get("budget")
                else "–––"
            ),
            "none" if not found["ledger"] else "verifies" if found["ledger"]["ok"] else "DOES NOT VERIFY",
        ]
        for site, found in facts["sites"].items()
    ]
    console.print(table(["site", "budget", "spent", "left", "ledger"], rows))
    if not any(facts["protection"].values()):
        console.print("nothing is protected in this run: neither noise nor masks")
