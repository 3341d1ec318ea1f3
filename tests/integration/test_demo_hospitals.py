"""`hemofed demo hospitals` ends by itself, and nothing of it is left: no process, no folder."""

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
COMMAND = [sys.executable, "-m", "pipeline.cli.main", "demo", "hospitals", "--study", "tiny.toml"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment by which everything that the demo starts is known, and in which its own folder is made."""
    (tmp_path / "tiny.toml").write_text(STUDY, "utf-8")
    (tmp_path / "temporary").mkdir()
    mark = f"demo-test-{time.monotonic_ns()}"
    yield {**os.environ, MARK_ENV: mark, "TMPDIR": str(tmp_path / "temporary")}
    kill_by_mark(mark)


def nothing_is_left(tmp_path: Path, place: Mapping[str, str]) -> None:
    assert kill_by_mark(place[MARK_ENV]) == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_it_ends_and_cleans_up(tmp_path: Path, place: dict[str, str]) -> None:
    done = subprocess.run([*COMMAND, "--json"], cwd=tmp_path, env=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["state"] == "finished"
    assert told["round"] == told["rounds"] == 2
    assert told["ledgers"] == dict.fromkeys(("site-01", "site-02", "site-03"), True)
    nothing_is_left(tmp_path, place)


def test_what_is_kept_stays_and_the_rest_goes(tmp_path: Path, place: dict[str, str]) -> None:
    """Interrupted as by Ctrl-C while the hospitals are there."""
    kept = tmp_path / "kept"
    with subprocess.Popen(
        [*COMMAND, "--keep", str(kept), "--stay"], cwd=tmp_path, env=place, stdout=subprocess.DEVNULL
    ) as demo:
        end = time.monotonic() + 300
        while not (kept / "site-02" / "membership.json").exists():
            assert demo.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
        demo.send_signal(signal.SIGINT)
        demo.wait(60)
    nothing_is_left(tmp_path, place)
    assert (kept / "coordinator" / "lead.token").exists()
