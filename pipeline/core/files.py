"""Atomic file writes (temporary file, fsync, rename), free names, and a lock for one process per folder."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.core.errors import NoSpaceError, RunFolderError


@contextlib.contextmanager
def raise_no_space(path: Path) -> Iterator[None]:
    """Turns the OSError of a full disk into a NoSpaceError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"no space left to write {path}; free some and try again (`hemofed run --resume` continues a run)"
            ) from error
        raise


def write_atomically(path: Path, data: bytes) -> Path:
    """A reader sees either the old file or the new one, never a part of it."""
    with raise_no_space(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(temporary_name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if os.name == "posix":  # other systems cannot open folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    return path


def free_path(path: Path) -> Path:
    """The path, or PATH-2, PATH-3, ... if it exists."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


@contextlib.contextmanager
def exclusive_lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """The lock ends with the process, however it ends. `wait`: for another process, instead of raising."""
    import fcntl  # not on Windows, where bundles are read but studies are not run

    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise RunFolderError(f"another process is using {folder}; wait for it, or stop it first") from error
        yield
