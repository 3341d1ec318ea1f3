"""docs/schemas/*.json describe the records as they are."""

import json

import pytest

from pipeline.coordinator.run_folder import RUN_FORMAT
from tools.write_run_schemas import RECORDS, render_schemas


@pytest.mark.parametrize(("path", "content"), list(render_schemas()), ids=RECORDS)
def test_schemas_are_current(path, content):
    assert path.read_text("utf-8") == content, "run: python tools/write_run_schemas.py"
    assert json.loads(content)["$id"] == f"hemofed/run-format-{RUN_FORMAT}/{path.stem}"
