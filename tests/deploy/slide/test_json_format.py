"""The JSON of a slide and its published schema."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_schema_of_the_slide_is_current() -> None:
    spec = importlib.util.spec_from_file_location("write_slide_schema", ROOT / "tools" / "write_slide_schema.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.SCHEMA_PATH.read_text("utf-8") == tool.render_schema(), "run tools/write_slide_schema.py"
    schema = json.loads(tool.render_schema())
    assert schema["properties"]["format"]["const"] == 1
    assert {"class", "is_counted"} <= schema["$defs"]["CellRecord"]["properties"].keys()
    assert {"num_counted", "prevalence_low", "verdict"} <= set(schema["$defs"]["SlideRecord"]["required"])
