"""Child processes that never outlive their parent, however it ends.

A child and its descendants inherit HEMOFED_MARK in their environment: `kill_by_mark` finds even those with their own
session or without a parent. The child also holds the reading end of a pipe whose other end only the parent has;
`exit_with_parent` watches it, so that a kill -9 of the parent ends the child and its descendants. To run a module so:
    python -m pipeline.ops.child_processes MODULE ARGS...
A child that is stopped (SIGSTOP) when its parent is killed cannot watch; the next parent calls `kill_by_mark` first.
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

MARK_ENV = "HEMOFED_MARK"  # "a:b:c": marks of all ancestors
PIPE_ENV = "HEMOFED_TIE"  # number of the file descriptor
MAX_LOG_BYTES = 10 * 2**20  # of a log file and of its one backup
MAX_KILL_PASSES = 20  # a process may start another before it is killed


@dataclass(frozen=True)
class ChildProcess:
    process: subprocess.Popen[bytes]
    own_mark: str  # of this child and its descendants
    log_path: Path
    started_at: float = field(default_factory=time.monotonic)
    _pipe_fds: list[int] = field(default_factory=list, repr=False)

    @classmethod
    def start(
        cls, argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None, log_path: Path, mark: str
    ) -> ChildProcess:
        """`env`: the whole environment; None: this process's. `mark`: of the home, for `kill_by_mark` after a kill -9."""
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
        """Terminates the child and its descendants, kills the rest after `grace` seconds; returns the exit code."""
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
        """Does not look up the pid of a child that has ended: another process may have it by now."""
        if not self.is_alive:
            return _find_marked(self.own_mark)
        try:
            child = psutil.Process(self.pid)
            return list({*child.children(recursive=True), *_find_marked(self.own_mark), child})
        except psutil.Error:
            return _find_marked(self.own_mark)


class RestartingProcess:
    """Restarts a child that ends: at once, then after 1, 2, 4 .. 60 s; a run of 60 s resets the delay."""

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
        self.exit_codes: list[int] = []  # since the last reset of the delay
        self.num_exits = 0  # in total

    def tick(self) -> ChildProcess | None:
        """Returns the running child or None; call it about every second."""
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
    """Kills this user's processes with the mark, except this one and its ancestors; returns their number."""
    num_killed = 0
    for _ in range(MAX_KILL_PASSES):
        if not (processes := _find_marked(mark)):
            break
        _kill_all(processes)
        num_killed += len(processes)
    return num_killed


def exit_with_parent() -> None:
    """Ends this process and its descendants when its parent is gone; call it early in the child."""
    pipe_fd = os.environ.pop(PIPE_ENV, None)
    if pipe_fd is None:
        return
    own_mark = os.environ.get(MARK_ENV, "").rpartition(":")[2]
    os.set_inheritable(int(pipe_fd), False)
    threading.Thread(
        target=_wait_for_parent, args=(int(pipe_fd), own_mark), name="exit-with-parent", daemon=True
    ).start()


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
    """Truncates a large log and keeps its end as a backup; the child appends, so it need not reopen the file."""
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
    except (psutil.Error, OSError):  # ended meanwhile, or access denied
        return False


def _kill_all(processes: Iterable[psutil.Process]) -> None:
    targets = list(processes)
    for process in targets:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil checks that the pid is still the same process
    _wait_until_gone(targets, 5.0)


def _wait_until_gone(processes: Iterable[psutil.Process], timeout: float) -> None:
    """Waits until all have ended; a zombie counts as ended."""
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
