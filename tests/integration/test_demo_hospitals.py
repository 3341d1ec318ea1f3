"""`hemofed demo hospitals` ends by itself, and leaves no process and no temporary folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.ops.child_processes import MARK_ENV, kill_by_mark

pytestmark = pytest.mark.slow

STUDY = """
name = "tiny"
rounds = 2

[data]
name = "moons"

[sites]
count = 3

[model]
name = "moons_net"

[local]
lr = 0.1
batch_size = 20

[evaluation]
evaluate_at = "sites"
"""
COMMAND = [sys.executable, "-m", "hemofed", "demo", "hospitals", "--study", "tiny.toml"]


@pytest.fixture
def demo_env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Marks all processes that the demo starts, and puts its temporary folder below tmp_path."""
    (tmp_path / "tiny.toml").write_text(STUDY, "utf-8")
    (tmp_path / "temporary").mkdir()
    mark = f"demo-test-{time.monotonic_ns()}"
    yield {**os.environ, MARK_ENV: mark, "TMPDIR": str(tmp_path / "temporary")}
    kill_by_mark(mark)


def assert_nothing_left(tmp_path: Path, demo_env: Mapping[str, str]) -> None:
    assert kill_by_mark(demo_env[MARK_ENV]) == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_demo_hospitals_finishes_and_cleans_up(tmp_path: Path, demo_env: dict[str, str]) -> None:
    completed = subprocess.run(
        [*COMMAND, "--json"], cwd=tmp_path, env=demo_env, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert result["state"] == "finished"
    assert result["round"] == result["rounds"] == 2
    assert result["ledgers"] == dict.fromkeys(("site-01", "site-02", "site-03"), True)
    assert_nothing_left(tmp_path, demo_env)


def test_interrupted_demo_hospitals_keeps_only_the_keep_folder(tmp_path: Path, demo_env: dict[str, str]) -> None:
    """Interrupted as by Ctrl-C while the sites are enrolling."""
    keep_folder = tmp_path / "kept"
    with subprocess.Popen(
        [*COMMAND, "--keep", str(keep_folder), "--stay"], cwd=tmp_path, env=demo_env, stdout=subprocess.DEVNULL
    ) as demo:
        deadline = time.monotonic() + 300
        while not (keep_folder / "site-02" / "membership.json").exists():
            assert demo.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        demo.send_signal(signal.SIGINT)
        demo.wait(60)
    assert_nothing_left(tmp_path, demo_env)
    assert (keep_folder / "coordinator" / "lead.token").exists()
