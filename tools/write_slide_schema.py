#!/usr/bin/env python3
"""Writes docs/schemas/slide.json, the JSON Schema of `hemofed predict --json`: .venv/bin/python tools/write_slide_schema.py"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCHEMA_PATH = ROOT / "docs" / "schemas" / "slide.json"


def render_schema() -> str:
    from deploy.slide.json_format import SlideDocument

    schema = SlideDocument.model_json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    SCHEMA_PATH.parent.mkdir(exist_ok=True)
    SCHEMA_PATH.write_text(render_schema(), "utf-8")
