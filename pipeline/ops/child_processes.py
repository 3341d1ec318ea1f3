"""Child processes that never outlive their keeper, however it ends.

A kept child carries HEMOFED_MARK in its environment, and so does all that it starts: `sweep` finds even what has a
session of its own or lost its parents. It also holds the reading end of a pipe whose other end only the keeper has;
`tied` watches it, so that a kill -9 of the keeper ends the child, which takes its own children along. To tie a module:
    python -m pipeline.ops.child_processes MODULE ARGS...
A child that was stopped (SIGSTOP) when its keeper was killed cannot watch: the next keeper sweeps before it starts.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "HEMOFED_MARK"  # "a:b:c": a keeper may itself be kept
TIE = "HEMOFED_TIE"  # number of the file descriptor
LOG_LIMIT = 10 * 2**20  # bytes; one older file of that size is kept beside it
PASSES = 20  # what is being killed may still have started something


@dataclass(frozen=True)
class Kept:
    process: subprocess.Popen[bytes]
    own: str  # mark of this child and what it starts
    log: Path
    since: float = field(default_factory=time.monotonic)
    _tie: list[int] = field(default_factory=list, repr=False)

    @classmethod
    def start(cls, argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None, log_path: Path, mark: str) -> Kept:
        """`env`: all of it; this process's own if None. `mark`: of the home, for `sweep` after a kill -9."""
        base = dict(os.environ if env is None else env)
        own = uuid.uuid4().hex
        trim(log_path)
        reading, writing = os.pipe()
        base |= {MARK: ":".join(filter(None, [base.get(MARK, ""), mark, own])), TIE: str(reading)}
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
                process = subprocess.Popen(
                    list(argv), cwd=cwd, env=base, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=(reading,), start_new_session=True,
                )  # fmt: skip
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return cls(process, own, log_path, _tie=[writing])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, grace: float = 10.0) -> int:
        """Its exit code. Ends it and all that it started; whoever is still there after `grace` seconds is killed."""
        tree = self._tree()
        for member in tree:
            with contextlib.suppress(psutil.Error):
                member.terminate()
        end = time.monotonic() + grace
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, end - time.monotonic()))
        _wait_gone(tree, end - time.monotonic())
        _kill([*tree, *self._tree()])
        sweep(self.own)
        code = self.process.wait()
        while self._tie:
            os.close(self._tie.pop())
        return code

    def _tree(self) -> list[psutil.Process]:
        """A child that has been waited for is not looked up: its number may be another's by now."""
        if not self.alive:
            return _carriers(self.own)
        try:
            child = psutil.Process(self.pid)
            return list({*child.children(recursive=True), *_carriers(self.own), child})
        except psutil.Error:
            return _carriers(self.own)


class Restarting:
    """Starts a child again when it ends: at once, then after 1, 2, 4 .. 60 s; a minute of life makes good again."""

    def __init__(
        self,
        start: Callable[[], Kept],
        first: float = 1.0,
        most: float = 60.0,
        calm: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._first, self._most, self._calm, self._clock = start, first, most, calm, clock
        self._wait, self._since, self._not_before = 0.0, 0.0, 0.0
        self.kept: Kept | None = None
        self.ended: list[int] = []  # exit codes since the last calm
        self.deaths = 0  # in all

    def tick(self) -> Kept | None:
        """To be called every second or so. The child, if it runs."""
        now = self._clock()
        if self.kept is not None and self.kept.alive:
            trim(self.kept.log)
            if now - self._since >= self._calm:
                self._wait, self.ended = 0.0, []
            return self.kept
        if self.kept is not None:
            code, self.kept = self.kept.stop(0), None
            self.ended, self.deaths = [*self.ended, code][-100:], self.deaths + 1
            self._later(now)
        if now < self._not_before:
            return None
        try:
            self.kept, self._since = self._start(), now
        except OSError:
            self._later(now)
            raise
        return self.kept

    def _later(self, now: float) -> None:
        self._not_before = now + self._wait
        self._wait = min(self._most, 2 * self._wait or self._first)

    def stop(self, grace: float = 10.0) -> None:
        if self.kept is not None:
            self.kept.stop(grace)
            self.kept = None


def sweep(mark: str) -> int:
    """How many were killed: all processes of this user that carry the mark, but not this one or those above it."""
    killed = 0
    for _ in range(PASSES):
        if not (found := _carriers(mark)):
            break
        _kill(found)
        killed += len(found)
    return killed


def tied() -> None:
    """To be called early in a kept child: it ends, with all that it started, when its keeper is gone."""
    text = os.environ.pop(TIE, None)
    if text is None:
        return
    own = os.environ.get(MARK, "").rpartition(":")[2]
    os.set_inheritable(int(text), False)
    threading.Thread(target=_watch, args=(int(text), own), name="tied", daemon=True).start()


def _watch(tie: int, own: str) -> None:
    try:
        while os.read(tie, 1):
            pass
    finally:
        try:
            sweep(own)
        finally:
            os._exit(1)


def trim(log: Path, limit: int = LOG_LIMIT) -> None:
    """The child writes on at the end, wherever that is: it opened the file to append."""
    if log.exists() and log.stat().st_size > limit:
        with log.open("rb") as file:
            file.seek(-limit, os.SEEK_END)
            log.with_name(f"{log.name}.1").write_bytes(file.read())
        os.truncate(log, 0)


def _carriers(mark: str) -> list[psutil.Process]:
    here = psutil.Process()
    spared = {here.pid, *(above.pid for above in here.parents())}
    return [process for process in psutil.process_iter() if process.pid not in spared and _carries(process, mark)]


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return mark in process.environ().get(MARK, "").split(":")
    except (psutil.Error, OSError):  # gone meanwhile, or not ours to look into
        return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    some = list(processes)
    for process in some:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil looks whether the number still means the same process
    _wait_gone(some, 5.0)


def _wait_gone(processes: Iterable[psutil.Process], seconds: float) -> None:
    """A zombie is gone: whether somebody fetches its exit code is not ours to wait for."""
    end = time.monotonic() + seconds
    left = list(processes)
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < end:
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


if __name__ == "__main__":
    tied()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
