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

MARK_ENV = "HEMOFED_MARK"  # "a:b:c": a keeper may itself be kept
PIPE_ENV = "HEMOFED_TIE"  # number of the file descriptor
MAX_LOG_BYTES = 10 * 2**20  # bytes; one older file of that size is kept beside it
MAX_KILL_PASSES = 20  # what is being killed may still have started something


@dataclass(frozen=True)
class ChildProcess:
    process: subprocess.Popen[bytes]
    own_mark: str  # mark of this child and what it starts
    log_path: Path
    started_at: float = field(default_factory=time.monotonic)
    _pipe_fds: list[int] = field(default_factory=list, repr=False)

    @classmethod
    def start(
        cls, argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None, log_path: Path, mark: str
    ) -> ChildProcess:
        """`env`: all of it; this process's own if None. `mark`: of the home, for `sweep` after a kill -9."""
        child_env = dict(os.environ if env is None else env)
        own_mark = uuid.uuid4().hex
        rotate_log(log_path)
        read_fd, write_fd = os.pipe()
        child_env |= {
            MARK_ENV: ":".join(filter(None, [child_env.get(MARK_ENV, ""), mark, own_mark])),
            PIPE_ENV: str(read_fd),
        }
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
                process = subprocess.Popen(
                    list(argv),
                    cwd=cwd,
                    env=child_env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read_fd,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
        return cls(process, own_mark, log_path, _pipe_fds=[write_fd])

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, grace: float = 10.0) -> int:
        """Its exit code. Ends it and all that it started; whoever is still there after `grace` seconds is killed."""
        process_tree = self._process_tree()
        for member in process_tree:
            with contextlib.suppress(psutil.Error):
                member.terminate()
        deadline = time.monotonic() + grace
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        _wait_until_gone(process_tree, deadline - time.monotonic())
        _kill_all([*process_tree, *self._process_tree()])
        kill_by_mark(self.own_mark)
        exit_code = self.process.wait()
        while self._pipe_fds:
            os.close(self._pipe_fds.pop())
        return exit_code

    def _process_tree(self) -> list[psutil.Process]:
        """A child that has been waited for is not looked up: its number may be another's by now."""
        if not self.is_alive:
            return _find_marked(self.own_mark)
        try:
            child = psutil.Process(self.pid)
            return list({*child.children(recursive=True), *_find_marked(self.own_mark), child})
        except psutil.Error:
            return _find_marked(self.own_mark)


class RestartingProcess:
    """Starts a child again when it ends: at once, then after 1, 2, 4 .. 60 s; a minute of life makes good again."""

    def __init__(
        self,
        start_child: Callable[[], ChildProcess],
        first_delay: float = 1.0,
        max_delay: float = 60.0,
        stable_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_child, self._first_delay, self._max_delay, self._stable_seconds, self._clock = (
            start_child,
            first_delay,
            max_delay,
            stable_seconds,
            clock,
        )
        self._delay, self._started_at, self._not_before = 0.0, 0.0, 0.0
        self.child: ChildProcess | None = None
        self.exit_codes: list[int] = []  # exit codes since the last calm
        self.num_exits = 0  # in all

    def tick(self) -> ChildProcess | None:
        """To be called every second or so. The child, if it runs."""
        now = self._clock()
        if self.child is not None and self.child.is_alive:
            rotate_log(self.child.log_path)
            if now - self._started_at >= self._stable_seconds:
                self._delay, self.exit_codes = 0.0, []
            return self.child
        if self.child is not None:
            exit_code, self.child = self.child.stop(0), None
            self.exit_codes, self.num_exits = [*self.exit_codes, exit_code][-100:], self.num_exits + 1
            self._schedule_restart(now)
        if now < self._not_before:
            return None
        try:
            self.child, self._started_at = self._start_child(), now
        except OSError:
            self._schedule_restart(now)
            raise
        return self.child

    def _schedule_restart(self, now: float) -> None:
        self._not_before = now + self._delay
        self._delay = min(self._max_delay, 2 * self._delay or self._first_delay)

    def stop(self, grace: float = 10.0) -> None:
        if self.child is not None:
            self.child.stop(grace)
            self.child = None


def kill_by_mark(mark: str) -> int:
    """How many were killed: all processes of this user that carry the mark, but not this one or those above it."""
    num_killed = 0
    for _ in range(MAX_KILL_PASSES):
        if not (processes := _find_marked(mark)):
            break
        _kill_all(processes)
        num_killed += len(processes)
    return num_killed


def exit_with_parent() -> None:
    """To be called early in a kept child: it ends, with all that it started, when its keeper is gone."""
    pipe_fd = os.environ.pop(PIPE_ENV, None)
    if pipe_fd is None:
        return
    own_mark = os.environ.get(MARK_ENV, "").rpartition(":")[2]
    os.set_inheritable(int(pipe_fd), False)
    threading.Thread(target=_wait_for_parent, args=(int(pipe_fd), own_mark), name="tied", daemon=True).start()


def _wait_for_parent(pipe_fd: int, own_mark: str) -> None:
    try:
        while os.read(pipe_fd, 1):
            pass
    finally:
        try:
            kill_by_mark(own_mark)
        finally:
            os._exit(1)


def rotate_log(log_path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """The child writes on at the end, wherever that is: it opened the file to append."""
    if log_path.exists() and log_path.stat().st_size > max_bytes:
        with log_path.open("rb") as file:
            file.seek(-max_bytes, os.SEEK_END)
            log_path.with_name(f"{log_path.name}.1").write_bytes(file.read())
        os.truncate(log_path, 0)


def _find_marked(mark: str) -> list[psutil.Process]:
    current = psutil.Process()
    excluded_pids = {current.pid, *(ancestor.pid for ancestor in current.parents())}
    return [
        process for process in psutil.process_iter() if process.pid not in excluded_pids and _has_mark(process, mark)
    ]


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return mark in process.environ().get(MARK_ENV, "").split(":")
    except (psutil.Error, OSError):  # gone meanwhile, or not ours to look into
        return False


def _kill_all(processes: Iterable[psutil.Process]) -> None:
    targets = list(processes)
    for process in targets:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil looks whether the number still means the same process
    _wait_until_gone(targets, 5.0)


def _wait_until_gone(processes: Iterable[psutil.Process], timeout: float) -> None:
    """A zombie is gone: whether somebody fetches its exit code is not ours to wait for."""
    deadline = time.monotonic() + timeout
    remaining = list(processes)
    while (remaining := [process for process in remaining if _is_running(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


if __name__ == "__main__":
    exit_with_parent()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
