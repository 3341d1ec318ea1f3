"""Writes docs/schemas/*.json, the JSON Schemas of a run's files, from the records: python tools/write_run_schemas.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.coordinator.run_folder import RUN_FORMAT
from pipeline.records.privacy_record import PrivacyRecord
from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import RunResults

SCHEMAS_FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
RECORDS = {"round_record": RoundRecord, "run_results": RunResults, "privacy_record": PrivacyRecord}


def render_schemas() -> Iterator[tuple[Path, str]]:
    """(file, content) of each schema."""
    for name, record_type in RECORDS.items():
        header = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"hemofed/run-format-{RUN_FORMAT}/{name}",
        }
        yield SCHEMAS_FOLDER / f"{name}.json", json.dumps(header | record_type.model_json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMAS_FOLDER.mkdir(exist_ok=True)
    for path, content in render_schemas():
        path.write_text(content, encoding="utf-8")
