"""Waiting, processes, and small file systems that a test can fill."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest


def wait_for(condition: Callable[[], Any], seconds: float = 20.0, interval: float = 0.02) -> Any:
    """Polls the condition and returns its first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition was still false after {seconds:g} s"
        time.sleep(interval)
    return value


def is_running(process: psutil.Process) -> bool:
    """False also for a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def mount_small_disk(mount_point: Path, size: str = "100k") -> Iterator[Path]:
    """Mounts a file system of this size and yields its folder; skips the test where mounting is not allowed."""
    mount_point.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount_point)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a small file system cannot be mounted here: there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def fill_disk(folder: Path, free_bytes: int = 0) -> None:
    """Leaves `free_bytes`, in whole pages, by the file "filling"."""
    (folder / "filling").write_bytes(bytes(shutil.disk_usage(folder).free - free_bytes))
