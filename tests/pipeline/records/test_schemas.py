"""docs/schemas/*.json describe the records as they are."""

import json

import pytest

from pipeline.coordinator.run_folder import RUN_FORMAT
from tools.write_schemas import RECORDS, SCHEMAS_FOLDER, render_schemas


@pytest.mark.parametrize(("path", "content"), list(render_schemas()), ids=RECORDS)
def test_schemas_are_current(path, content):
    assert path.read_text("utf-8") == content, "run: python tools/write_schemas.py"
    assert json.loads(content)["$id"] == f"hemofed/run-format-{RUN_FORMAT}/{path.stem}"


def test_the_schemas_folder_has_no_other_file():
    assert {path.stem for path in SCHEMAS_FOLDER.iterdir()} == set(RECORDS)
