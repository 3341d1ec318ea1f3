"""Allows one worker process for each run at a site: a new process kills the previous one, which may hang."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import psutil

from pipeline.core.files import write_atomically


def take_over_run(pid_file: Path) -> bool:
    """Returns whether a previous process was killed. Compares its start time, because process ids are reused."""
    this_process = psutil.Process()
    previous = _read_pid_file(pid_file)
    was_running = False
    if previous is not None and previous[0] != this_process.pid:
        with contextlib.suppress(psutil.Error):
            previous_process = psutil.Process(previous[0])
            if abs(previous_process.create_time() - previous[1]) < 1.0 and previous_process.uids().real == os.getuid():
                previous_process.kill()  # also ends a stopped process
                previous_process.wait(10)
                was_running = True
    write_atomically(pid_file, json.dumps({"pid": this_process.pid, "born": this_process.create_time()}).encode())
    return was_running


def _read_pid_file(pid_file: Path) -> tuple[int, float] | None:
    try:
        record = json.loads(pid_file.read_text("utf-8"))
        return int(record["pid"]), float(record["born"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
