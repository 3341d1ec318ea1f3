"""Allows one worker process for each run at a site: a new process kills the previous one, which may hang."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import ClassVar

import psutil

from pipeline.records.base import FileRecord


class WorkerProcess(FileRecord):
    FILE_NAME: ClassVar[str] = "worker.json"

    pid: int
    created: float  # seconds since 1970; process ids are reused


def take_over_run(run_folder: Path) -> bool:
    """Returns whether a previous process was killed."""
    this_process = psutil.Process()
    previous = WorkerProcess.read_if_valid(run_folder)
    was_running = False
    if previous is not None and previous.pid != this_process.pid:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(previous.pid)
            if abs(process.create_time() - previous.created) < 1.0 and process.uids().real == os.getuid():
                process.kill()  # also ends a stopped process
                process.wait(10)
                was_running = True
    WorkerProcess(pid=this_process.pid, created=this_process.create_time()).write(run_folder)
    return was_running
