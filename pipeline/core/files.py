"""Files that are whole or not there: temporary name, fsync, rename; and one run at a time in a folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.core.errors import BadRun, NoSpace


@contextlib.contextmanager
def full_disk_is_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"no space left to write {path}; free some and try again (a run goes on with `hemofed run --resume`)"
            ) from error
        raise


def write_atomically(path: Path, data: bytes) -> Path:
    """A reader sees the old file or the new one, never half of it."""
    with full_disk_is_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if os.name == "posix":  # elsewhere folders cannot be opened
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    return path


@contextlib.contextmanager
def alone_in(folder: Path, wait: bool = False) -> Iterator[None]:
    """The lock goes with the process, however it ends. `wait` for another process instead of refusing."""
    import fcntl  # not on Windows, where bundles are read but studies are not run

    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise BadRun(f"{folder} is being run by another process; wait for it, or stop it first") from error
        yield


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """By round; of a round that stands twice the later line counts, and a last line cut short by a kill does not."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    by_round: dict[int, dict[str, Any]] = {}
    for place, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            by_round[int(line["round"])] = line
        except (ValueError, KeyError, TypeError) as error:
            if place == len(lines):
                break
            raise BadRun(f"{path}, line {place}: {error!r}; remove the line, or resume the run") from error
    return [by_round[turn] for turn in sorted(by_round)]
