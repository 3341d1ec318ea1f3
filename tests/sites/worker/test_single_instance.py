"""A new process for a run ends the one before it, also one that hangs, and nobody else."""

import json
import os
import signal
import subprocess
import sys

import psutil

from sites.worker.single_instance import take_over_run

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_the_one_before_is_ended_even_if_it_is_stopped(tmp_path):
    with subprocess.Popen(SLEEP) as other:
        born = psutil.Process(other.pid).create_time()
        (tmp_path / "worker.json").write_text(json.dumps({"pid": other.pid, "born": born}))
        os.kill(other.pid, signal.SIGSTOP)
        assert take_over_run(tmp_path / "worker.json")
        assert not psutil.pid_exists(other.pid)
    assert json.loads((tmp_path / "worker.json").read_text())["pid"] == os.getpid()
    assert not take_over_run(tmp_path / "worker.json")


def test_a_process_that_only_has_its_number_lives(tmp_path):
    with subprocess.Popen(SLEEP) as other:
        (tmp_path / "worker.json").write_text(json.dumps({"pid": other.pid, "born": 1.0}))
        assert not take_over_run(tmp_path / "worker.json")
        assert other.poll() is None
        other.kill()
    (tmp_path / "worker.json").write_text("nonsense")
    assert not take_over_run(tmp_path / "worker.json")
