"""Writes audit.html, audit.pdf and audit.json from the facts of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from pipeline.core.files import write_atomically
from pipeline.reports.document.html import write_html
from pipeline.reports.document.pdf import write_pdf
from privacy.audit.document.report import build_report
from privacy.audit.facts import AuditFacts


def write_audit(facts: AuditFacts, run_folder: Path, out_folder: Path) -> list[Path]:
    """Returns the three paths. `run_folder` holds the images of attacks."""
    out_folder.mkdir(parents=True, exist_ok=True)
    document = build_report(facts, run_folder)
    facts_json = json.dumps(facts_to_dict(facts), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return [
        write_html(document, out_folder / "audit.html"),
        write_pdf(document, out_folder / "audit.pdf"),
        write_atomically(out_folder / "audit.json", facts_json.encode()),
    ]


def facts_to_dict(facts: AuditFacts) -> Mapping[str, JsonValue]:
    """The content of audit.json: infinities are None, because JSON has none."""
    content: JsonValue = to_finite_json(facts.model_dump(mode="json"))
    assert isinstance(content, dict)
    return content


def to_finite_json(value: JsonValue) -> JsonValue:
    """Replaces infinities and NaN by None."""
    if isinstance(value, dict):
        return {key: to_finite_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
