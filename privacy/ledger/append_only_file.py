"""An append-only file of lines: one writer at a time, synced, and repaired after a crash.

A line is written and synced before anything depends on it, so an incomplete last line was never used and may be moved
aside. A last line that lacks only its line break is kept, because it may be an old line of an edited file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from pipeline.core.errors import LedgerError
from pipeline.core.files import raise_no_space, write_atomically


@contextlib.contextmanager
def lock_file(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    """Shared for readers, exclusive for writers; released when the process ends for any reason."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be opened: {error.strerror}; name the right file") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)
        yield fd
    finally:
        os.close(fd)


def read_from(fd: int, start: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as stream:
        stream.seek(start)
        return stream.read()


def append_line(fd: int, path: Path, line: bytes) -> None:
    """Restores the file's length if the disk is full."""
    start = os.lseek(fd, 0, os.SEEK_END)
    with raise_no_space(path):
        try:
            remaining = line
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
            os.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, start)
            raise


def repair_last_line(fd: int, path: Path) -> Path | None:
    """Completes a last line that lacks its line break, or moves an incomplete one to ledger.torn-<n> and returns that path."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return None
    data = read_from(fd, 0)
    last_line = data[data.rfind(b"\n") + 1 :]
    if _is_complete(last_line):
        append_line(fd, path, b"\n")
        return None
    torn_path = next(p for n in count(1) if not (p := path.with_suffix(f".torn-{n}")).exists())
    write_atomically(torn_path, last_line)
    os.ftruncate(fd, len(data) - len(last_line))
    os.fsync(fd)
    return torn_path


def _is_complete(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Syncs the folder, which makes the name of a new file durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
