"""Writes audit.html, audit.pdf and audit.json from the facts of a run."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.core.files import write_atomically
from pipeline.reports.document.html import write_html
from pipeline.reports.document.pdf import write_pdf
from privacy.audit.document.report import build_report
from privacy.audit.facts import AuditFacts


def write_audit(facts: AuditFacts, run_folder: Path, out_folder: Path) -> list[Path]:
    """Returns the three paths. `run_folder` holds the images of attacks."""
    out_folder.mkdir(parents=True, exist_ok=True)
    document = build_report(facts, run_folder)
    facts_json = json.dumps(facts.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return [
        write_html(document, out_folder / "audit.html"),
        write_pdf(document, out_folder / "audit.pdf"),
        write_atomically(out_folder / "audit.json", facts_json.encode()),
    ]
