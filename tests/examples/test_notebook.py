"""The notebook of examples/: its code cells run one after the other, and it is stored without outputs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hemofed

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "examples" / "first_federation.ipynb").read_text("utf-8"))["cells"]
CODE_CELLS = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_outputs_are_stripped():
    code_cells = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells)


def test_cells_use_names_that_exist():
    nodes = [node for code in CODE_CELLS for node in ast.walk(ast.parse(code))]
    names = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hemofed"
    }
    assert {"run", "export", "predict"} <= names <= set(hemofed.__all__)


@pytest.mark.slow
def test_notebook_runs(tmp_path):
    """In one process, as in a notebook; no other part of it needs Jupyter."""
    (tmp_path / "cells.py").write_text("\n\n".join(CODE_CELLS), "utf-8")
    homes = {f"XDG_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    completed = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=os.environ | homes, capture_output=True, text=True, timeout=1800
    )
    assert completed.returncode == 0, completed.stderr
    assert "centralized  balanced accuracy" in completed.stdout
    assert "cells counted" in completed.stdout
    assert (tmp_path / "first-federation" / "report" / "report.html").exists()
