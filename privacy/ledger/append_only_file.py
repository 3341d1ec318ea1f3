"""A file of lines that only grows: one writer at a time, on the disk or not there, and mended after a crash.

A line is written whole and synced before anybody hears of it. So a last line without its end was never announced: it
may be moved aside. Should all of it be there but its end, it is kept, for it might be an old line in a mended file.
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
    """The lock goes with the process, however it ends. Readers share it, writers do not."""
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
    """If the disk is full, the file is as it was."""
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
    """Gives a last line its end, or moves what a crash left of it to ledger.torn-<n>; where to, if so."""
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
    """A new file's name is on the disk only after its folder is."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
