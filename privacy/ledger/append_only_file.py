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

from pipeline.core.errors import BadLedger
from pipeline.core.files import full_disk_is_named, write_atomically


@contextlib.contextmanager
def locked(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    """The lock goes with the process, however it ends. Readers share it, writers do not."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise BadLedger(f"the ledger {path} cannot be opened: {error.strerror}; name the right file") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX if flags & os.O_RDWR else fcntl.LOCK_SH)
        yield file
    finally:
        os.close(file)


def read_from(file: int, start: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as whole:
        whole.seek(start)
        return whole.read()


def append_line(file: int, path: Path, line: bytes) -> None:
    """If the disk is full, the file is as it was."""
    start = os.lseek(file, 0, os.SEEK_END)
    with full_disk_is_named(path):
        try:
            left = line
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, start)
            raise


def mend(file: int, path: Path) -> Path | None:
    """Gives a last line its end, or moves what a crash left of it to ledger.torn-<n>; where to, if so."""
    size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return None
    data = read_from(file, 0)
    rest = data[data.rfind(b"\n") + 1 :]
    if _complete(rest):
        append_line(file, path, b"\n")
        return None
    aside = next(p for n in count(1) if not (p := path.with_suffix(f".torn-{n}")).exists())
    write_atomically(aside, rest)
    os.ftruncate(file, len(data) - len(rest))
    os.fsync(file)
    return aside


def _complete(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def sync_folder(folder: Path) -> None:
    """A new file's name is on the disk only after its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
