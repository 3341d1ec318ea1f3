"""A new worker process of a run kills the previous one, also a stopped one, and no other process."""

import json
import os
import signal
import subprocess
import sys

import psutil

from sites.worker.single_instance import take_over_run

SLEEP_COMMAND = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_the_previous_process_is_killed_even_if_stopped(tmp_path):
    with subprocess.Popen(SLEEP_COMMAND) as other:
        born = psutil.Process(other.pid).create_time()
        (tmp_path / "worker.json").write_text(json.dumps({"pid": other.pid, "created": born}))
        os.kill(other.pid, signal.SIGSTOP)
        assert take_over_run(tmp_path)
        assert not psutil.pid_exists(other.pid)
    assert json.loads((tmp_path / "worker.json").read_text())["pid"] == os.getpid()
    assert not take_over_run(tmp_path)


def test_a_process_with_a_reused_pid_is_not_killed(tmp_path):
    with subprocess.Popen(SLEEP_COMMAND) as other:
        (tmp_path / "worker.json").write_text(json.dumps({"pid": other.pid, "created": 1.0}))
        assert not take_over_run(tmp_path)
        assert other.poll() is None
        other.kill()
    (tmp_path / "worker.json").write_text("nonsense")
    assert not take_over_run(tmp_path)
