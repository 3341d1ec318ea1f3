"""The plugin package of examples/: installed with pip, found by its entry point, and correct."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.coordinator.run_folder import RunFolder
from tests.support.studies import final_weights

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "hemofed-feddyn"
RunPython = Callable[..., str]


@pytest.fixture(scope="module")
def run_python(tmp_path_factory) -> RunPython:
    """Runs Python where the plugin is installed, in a new folder."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("target")
    shutil.copytree(PLUGIN, source)  # pip leaves files in the source folder
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    env = os.environ | {"PYTHONPATH": f"{target}{os.pathsep}{ROOT}"}

    def run(*arguments: object, cwd: Path = target) -> str:
        command = [sys.executable, *map(str, arguments)]
        completed = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    return run


def test_plugin_is_short_and_imports_from_hemofed_only():
    text = (PLUGIN / "feddyn.py").read_text("utf-8")
    assert len(text.splitlines()) < 60
    nodes = list(ast.walk(ast.parse(text)))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert modules == {"__future__", "collections.abc", "dataclasses", "hemofed", "pydantic", "torch", "typing"}


def test_entry_point_is_found(run_python):
    strategies = json.loads(run_python("-m", "hemofed", "strategies", "--json"))["strategies"]
    (feddyn,) = [row for row in strategies if row["name"] == "feddyn"]
    assert feddyn["paper"] == "Acar et al. 2021"
    assert feddyn["settings"] == {"alpha": 0.01}


def test_its_own_test_passes(run_python, tmp_path):
    shutil.copy(PLUGIN / "test_feddyn.py", tmp_path)
    assert "2 passed" in run_python("-m", "pytest", "-q", "test_feddyn.py", cwd=tmp_path)


def test_without_alpha_it_is_fedavg(run_python, tmp_path):
    runs = {
        "plain": {"strategy": "fedavg"},
        "neutral": {"strategy": "feddyn", "strategy.alpha": 0.0},
        "active": {"strategy": "feddyn", "strategy.alpha": 0.2},
    }
    common = {"rounds": 4, "weighting": "equal"}
    code = "import hemofed\n" + "".join(
        f"hemofed.run('moons-demo', out={name!r}, overrides={common | overrides!r})\n"
        for name, overrides in runs.items()
    )
    run_python("-c", code, cwd=tmp_path)
    plain, neutral, active = (final_weights(RunFolder(tmp_path / name)) for name in runs)
    assert plain.equal(neutral)
    assert not plain.allclose(active, atol=1e-3)
