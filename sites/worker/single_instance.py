"""One process at a time works on a run at a site: a new one ends the one before it, which may hang or know nothing of it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import psutil

from pipeline.core.files import write_atomically


def take_over(file: Path) -> bool:
    """Whether there was another. By number and birth, so that nobody is killed who only has its number."""
    me = psutil.Process()
    before = _written(file)
    found = False
    if before is not None and before[0] != me.pid:
        with contextlib.suppress(psutil.Error):
            other = psutil.Process(before[0])
            if abs(other.create_time() - before[1]) < 1.0 and other.uids().real == os.getuid():
                other.kill()  # also one that was stopped
                other.wait(10)
                found = True
    write_atomically(file, json.dumps({"pid": me.pid, "born": me.create_time()}).encode())
    return found


def _written(file: Path) -> tuple[int, float] | None:
    try:
        told = json.loads(file.read_text("utf-8"))
        return int(told["pid"]), float(told["born"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
