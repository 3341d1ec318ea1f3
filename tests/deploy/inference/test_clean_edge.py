"""The wheel with the edge extras alone, in an environment of its own: small, quick, no torch, and the same answers."""

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

MOST = 220 << 20  # bytes, of what pip installed
NOT_OURS = ("pip", "setuptools", "pkg_resources", "_distutils_hack")  # come with every environment


@pytest.fixture(scope="module")
def edge(wheel, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("edge")
    venv.create(place, with_pip=True)
    install(place, f"{wheel}[edge]")
    return place


def install(place: Path, what: str) -> None:
    done = subprocess.run(
        [place / "bin" / "python", "-m", "pip", "install", "-q", what], capture_output=True, text=True
    )
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr


def size(place: Path) -> int:
    (packages,) = (place / "lib").glob("python*/site-packages")
    found = (
        p for p in packages.rglob("*") if p.is_file() and not p.relative_to(packages).parts[0].startswith(NOT_OURS)
    )
    return sum(p.stat().st_size for p in found)


def call(place: Path, env: dict[str, str], cwd: Path, *words: object, code: int = 0) -> str:
    done = subprocess.run(
        [place / "bin" / "hemofed", *map(str, words)], capture_output=True, text=True, env=env, cwd=cwd
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_from_an_empty_machine_to_a_slide_report(edge, world, images, runtime, trusted, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        k: trusted[k] for k in ("HEMOFED_TRUST", "HEMOFED_LABS")
    }
    assert size(edge) <= MOST
    has = [
        edge / "bin" / "python",
        "-c",
        "import importlib.util as u; print([m for m in ('torch', 'cv2') if u.find_spec(m)])",
    ]
    assert subprocess.run(has, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.strip() == "[]"
    Image.fromarray(images[0]).save(tmp_path / "cell.png")
    (one,) = json.loads(call(edge, env, tmp_path, "predict", world.made.zip, "cell.png", "--json"))["images"]
    mine = runtime.answer(images[:1]).probabilities[0]
    assert np.allclose(list(one["probabilities"].values()), mine, atol=1e-5)
    Image.fromarray(render_field(1, types=[0] * 30 + [9] * 5).image).save(tmp_path / "field.png")
    said = call(edge, env, tmp_path, "predict", world.made.zip, "field.png", code=2)
    assert "pip install 'hemofed[edge-smear]'" in said
    install(edge, "hemofed[edge-smear]")
    said = call(edge, env, tmp_path, "predict", world.made.zip, "field.png", "-o", "report")
    assert "slide report" in said
    assert "research use only, not a medical device" in said
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    said = call(edge, env, tmp_path, "export", "x", "-o", "y", code=2)
    assert "pip install 'hemofed[" in said
    call(edge, env, tmp_path, "demo", "slide", "slide", "--cells", 60)
    call(edge, env, tmp_path, "predict", world.made.folder, "slide")
