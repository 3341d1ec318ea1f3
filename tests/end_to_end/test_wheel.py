"""The wheel in a clean environment: its files, its behavior without extras, and a study with the packages of this environment."""

import os
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def clean_env(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    done = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "-q", str(wheel)], capture_output=True, text=True
    )
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    return folder


def test_wheel_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "pipeline/study/packaged/smear-demo.toml",
        "sites/data/renderer/rasterize.py",
        "pipeline/reproductions/reference/fashion_mnist_fedavg.csv",
        "pipeline/reports/document/page.html",
        "pipeline/reports/document/page.css",
        "sites/worker/task_session.py",
        "models/networks/cnn.py",
        "privacy/__init__.py",
        "hemofed/strategies.py",
        "hemofed/py.typed",
        "sites/py.typed",
        "deploy/__init__.py",
    } <= names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/", "docs/", "examples/"))]


def test_wheel_without_extras_names_the_missing_extra(clean_env, tmp_path):
    hemofed = clean_env / "bin" / "hemofed"
    assert "reproduce" in subprocess.run([hemofed, "--help"], capture_output=True, text=True, check=True).stdout
    done = subprocess.run([hemofed, "run"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'hemofed[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_study_runs_from_the_wheel(clean_env, tmp_path):
    """The dependencies come from this environment, hemofed from the wheel."""
    env = os.environ | {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    command = [clean_env / "bin" / "python", "-c", "import pipeline; print(pipeline.__file__)"]
    assert (
        str(clean_env)
        in subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=env).stdout
    )
    run = [clean_env / "bin" / "hemofed", "run", "--set", "rounds=1", "--json"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "smear-demo" / "report.html").stat().st_size > 10_000
