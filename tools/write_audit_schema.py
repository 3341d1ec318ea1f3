"""Writes docs/schemas/audit.json: the JSON Schema of audit.json. Run it after a change of privacy/audit/facts.py."""

from __future__ import annotations

import json
from pathlib import Path

from privacy.audit.facts import AuditFacts

SCHEMA_FILE = Path(__file__).parents[1] / "docs" / "schemas" / "audit.json"


def render_schema() -> str:
    schema = AuditFacts.model_json_schema(mode="serialization")
    return (
        json.dumps(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"}, indent=1, ensure_ascii=False)
        + "\n"
    )


if __name__ == "__main__":
    SCHEMA_FILE.parent.mkdir(exist_ok=True)
    SCHEMA_FILE.write_text(render_schema(), encoding="utf-8")
