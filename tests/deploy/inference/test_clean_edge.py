"""The wheel with the edge extras in its own virtual environment: small, without torch, and with the same predictions."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sites.data.renderer.field import render_field

MAX_INSTALLED_BYTES = 220 << 20
PREINSTALLED = ("pip", "setuptools", "pkg_resources", "_distutils_hack")  # in every environment


@pytest.fixture(scope="module")
def edge_venv(wheel, tmp_path_factory) -> Path:
    environment = tmp_path_factory.mktemp("edge")
    venv.create(environment, with_pip=True)
    pip_install(environment, f"{wheel}[edge]")
    return environment


def pip_install(environment: Path, requirement: str) -> None:
    process = subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", "-q", requirement], capture_output=True, text=True
    )
    if process.returncode and "No matching distribution" in process.stderr:
        pytest.skip("the package index cannot be reached")
    assert process.returncode == 0, process.stderr


def installed_bytes(environment: Path) -> int:
    (packages,) = (environment / "lib").glob("python*/site-packages")
    found = (
        p for p in packages.rglob("*") if p.is_file() and not p.relative_to(packages).parts[0].startswith(PREINSTALLED)
    )
    return sum(p.stat().st_size for p in found)


def run_hemofed(environment: Path, env: dict[str, str], cwd: Path, *arguments: object, code: int = 0) -> str:
    process = subprocess.run(
        [environment / "bin" / "hemofed", *map(str, arguments)], capture_output=True, text=True, env=env, cwd=cwd
    )
    assert process.returncode == code, process.stderr
    return process.stdout + process.stderr


def test_wheel_without_torch_writes_a_slide_report(edge_venv, exported_run, images, runtime, trusted_env, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        k: trusted_env[k] for k in ("HEMOFED_TRUST", "HEMOFED_LOCAL_CALIBRATIONS")
    }
    assert installed_bytes(edge_venv) <= MAX_INSTALLED_BYTES
    has = [
        edge_venv / "bin" / "python",
        "-c",
        "import importlib.util as u; print([m for m in ('torch', 'cv2') if u.find_spec(m)])",
    ]
    assert subprocess.run(has, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip() == "[]"
    Image.fromarray(images[0]).save(tmp_path / "cell.png")
    (one,) = json.loads(
        run_hemofed(edge_venv, env, tmp_path, "predict", exported_run.export.zip_path, "cell.png", "--json")
    )["images"]
    mine = runtime.predict(images[:1]).probabilities[0]
    assert np.allclose(list(one["class_probabilities"].values()), mine, atol=1e-5)
    Image.fromarray(render_field(1, types=[0] * 30 + [9] * 5).image).save(tmp_path / "field.png")
    output = run_hemofed(edge_venv, env, tmp_path, "predict", exported_run.export.zip_path, "field.png", code=2)
    assert "pip install 'hemofed[edge-smear]'" in output
    pip_install(edge_venv, "hemofed[edge-smear]")
    output = run_hemofed(edge_venv, env, tmp_path, "predict", exported_run.export.zip_path, "field.png", "-o", "report")
    assert "slide report" in output
    assert "research use only, not a medical device" in output
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    output = run_hemofed(edge_venv, env, tmp_path, "export", "x", "-o", "y", code=2)
    assert "pip install 'hemofed[" in output
    run_hemofed(edge_venv, env, tmp_path, "demo", "slide", "slide", "--cells", 60)
    run_hemofed(edge_venv, env, tmp_path, "predict", exported_run.export.folder, "slide")
