"""Real processes: killed parents, children with their own session, stopped children."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from pipeline.ops.child_processes import (
    MARK_ENV,
    MAX_LOG_BYTES,
    ChildProcess,
    RestartingProcess,
    kill_by_mark,
    rotate_log,
)
from tests.support.machine import is_running, wait_for

# a child that starts a grandchild, another one with its own session and without our pipe, writes all pids, and waits
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
near = subprocess.Popen(sleep)
far = subprocess.Popen(sleep, start_new_session=True, close_fds=True)
open("family.tmp", "w").write(f"{os.getpid()} {near.pid} {far.pid}")
os.rename("family.tmp", "family")
time.sleep(600)
"""
# a parent of that child, to be killed
PARENT = """
import os, sys, time
from pathlib import Path
from pipeline.ops.child_processes import ChildProcess
here = Path(sys.argv[1])
ChildProcess.start([sys.executable, "-m", "pipeline.ops.child_processes", "family_module"], here, os.environ | {"PYTHONPATH": str(here)}, here / "log", sys.argv[2])
time.sleep(600)
"""


@pytest.fixture
def mark():
    name = uuid.uuid4().hex
    yield name
    kill_by_mark(name)


@pytest.fixture
def family_folder(tmp_path):
    (tmp_path / "family_module.py").write_text(FAMILY)
    return tmp_path


def wait_for_family(folder: Path) -> list[psutil.Process]:
    wait_for((folder / "family").exists)
    return [psutil.Process(int(pid)) for pid in (folder / "family").read_text().split()]


def start_family(folder: Path, mark: str) -> ChildProcess:
    argv = [sys.executable, "-m", "pipeline.ops.child_processes", "family_module"]
    return ChildProcess.start(
        argv, folder, os.environ | {"PYTHONPATH": str(folder)}, folder / "log" / "child.log", mark
    )


def start_and_kill_parent(folder: Path, mark: str, before_kill=lambda members: None) -> list[psutil.Process]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), mark])
    try:
        members = wait_for_family(folder)
        before_kill(members)
    finally:
        parent.kill()
        parent.wait()
    return members


def test_kill_of_the_parent_ends_child_and_grandchildren(family_folder, mark):
    members = start_and_kill_parent(family_folder, mark)
    assert len(members) == 3
    wait_for(lambda: not any(map(is_running, members)))


def test_kill_by_mark_ends_a_stopped_child_of_a_killed_parent(family_folder, mark):
    members = start_and_kill_parent(
        family_folder, mark, before_kill=lambda members: members[0].send_signal(signal.SIGSTOP)
    )
    assert all(map(is_running, members))
    assert kill_by_mark(mark) == 3
    assert not any(map(is_running, members))
    assert kill_by_mark(mark) == 0


def test_stop_ends_the_process_tree(family_folder, mark):
    child = start_family(family_folder, mark)
    members = wait_for_family(family_folder)
    assert child.is_alive
    assert members[0].pid == child.pid
    assert child.stop(grace=5) == -signal.SIGTERM
    assert not child.is_alive
    assert not any(map(is_running, members))


def test_stop_kills_a_stopped_child_and_orphaned_grandchildren(family_folder, mark):
    child = start_family(family_folder, mark)
    members = wait_for_family(family_folder)
    members[0].kill()  # init adopts the grandchildren, one of which has its own session
    wait_for(lambda: not child.is_alive)
    assert all(map(is_running, members[1:]))
    child.stop(grace=0)
    assert not any(map(is_running, members))
    (family_folder / "family").unlink()

    child = start_family(family_folder, mark)
    members = wait_for_family(family_folder)
    members[0].send_signal(signal.SIGSTOP)
    assert child.stop(grace=0.3) == -signal.SIGKILL
    assert not any(map(is_running, members))


def test_kill_by_mark_spares_other_marks_and_its_ancestors(family_folder, mark):
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {MARK_ENV: f"{mark}x"}
    )
    own = f"from pipeline.ops.child_processes import kill_by_mark; print(kill_by_mark({mark!r}))"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {own!r}], check=True)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", parent],
            env=os.environ | {MARK_ENV: mark},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "0"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_child_of_a_child_carries_both_marks(family_folder, mark):
    outer = ChildProcess.start(
        [sys.executable, "-c", PARENT, str(family_folder), "inner"],
        family_folder,
        None,
        family_folder / "outer.log",
        mark,
    )
    members = wait_for_family(family_folder)
    assert members[2].environ()[MARK_ENV].split(":")[:3:2] == [mark, "inner"]
    outer.stop(grace=5)
    wait_for(lambda: not any(map(is_running, members)))


def test_module_runs_with_its_arguments_and_its_output_is_logged(tmp_path, mark):
    (tmp_path / "printing.py").write_text("import sys; print(__name__, sys.argv[1:]); sys.exit(3)")
    child = ChildProcess.start(
        [sys.executable, "-m", "pipeline.ops.child_processes", "printing", "a", "--b"],
        tmp_path,
        os.environ | {"PYTHONPATH": str(tmp_path)},
        tmp_path / "log",
        mark,
    )
    assert child.process.wait(20) == 3
    child.stop(0)
    assert child.log_path.read_text() == "__main__ ['a', '--b']\n"
    assert child.log_path.stat().st_mode & 0o777 == 0o600


def test_log_is_rotated_while_the_child_writes(tmp_path):
    log = tmp_path / "log"
    with log.open("ab") as file:
        file.write(b"a" * 100 + b"b" * 50)
        file.flush()
        rotate_log(log, max_bytes=60)
        file.write(b"c")
    assert log.read_bytes() == b"c"
    assert (tmp_path / "log.1").read_bytes() == b"a" * 10 + b"b" * 50
    rotate_log(tmp_path / "none", max_bytes=MAX_LOG_BYTES)


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_restart_delay_doubles_and_is_reset_after_a_minute(tmp_path, mark):
    clock, started = FakeClock(), []

    def start() -> ChildProcess:
        started.append(clock.now)
        return ChildProcess.start(
            [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, None, tmp_path / "log", mark
        )

    def kill_child() -> None:
        restarting.child.process.kill()
        restarting.child.process.wait()

    restarting = RestartingProcess(start, clock=clock)
    try:
        restarting.tick()
        for _ in range(4):
            kill_child()
            while restarting.tick() is None:
                clock.now += 0.5
        assert started == [0, 0, 1, 3, 7]
        assert restarting.exit_codes == [-signal.SIGKILL] * 4
        clock.now += 60
        restarting.tick()
        assert restarting.exit_codes == []
        kill_child()
        restarting.tick()
        assert started[-1] == 67  # at once again
    finally:
        restarting.stop(0)
    assert restarting.child is None
    assert kill_by_mark(mark) == 0


def test_missing_program_is_tried_again_later(tmp_path, mark):
    clock = FakeClock()
    restarting = RestartingProcess(
        lambda: ChildProcess.start([str(tmp_path / "no")], tmp_path, None, tmp_path / "log", mark), clock=clock
    )
    with pytest.raises(FileNotFoundError):
        restarting.tick()
    with pytest.raises(FileNotFoundError):
        restarting.tick()
    assert restarting.tick() is None
    clock.now = 1.0
    with pytest.raises(FileNotFoundError):
        restarting.tick()
