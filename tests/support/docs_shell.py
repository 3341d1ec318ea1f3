"""A shell for the commands of one page: variables last, what goes on beside them is ended and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.ops.child_processes import MARK_ENV, kill_by_mark
from pipeline.service.runtime.serve import find_free_ports


@dataclass
class Shell:
    """What lasts from one command of a page to the next."""

    folder: Path
    env: dict[str, str]
    port: str
    beside: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # command -> its process

    def run(self, command: str, seconds: float | None) -> tuple[int, str]:
        kept = self.folder / ".variables"
        text = f'set -a\n{command}\nstatus=$?\nset +a\nenv -0 > "{kept}"\nexit $status'
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env=self.env,
            timeout=seconds,
            capture_output=True,
            text=True,
            check=False,
        )
        if kept.exists():
            self.env = dict(one.split("=", 1) for one in kept.read_text("utf-8").split("\0") if one)
            kept.unlink()
        return done.returncode, done.stdout + done.stderr

    def start(self, command: str) -> None:
        with self._log(command).open("wb") as log:
            self.beside[command] = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def gone(self) -> list[str]:
        return [command for command, process in self.beside.items() if process.poll() is not None]

    def stop(self) -> list[str]:
        """What those that went on would not, or did badly."""
        wrong = [f"had ended: {self.said(command)}" for command in self.gone()]
        for process in self.beside.values():
            process.terminate()
        for command, process in self.beside.items():
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            wrong += [f"ended with {code}: {self.said(command)}"] if code else []
        return wrong

    def said(self, command: str) -> str:
        return f"$ {command} &\n{self._log(command).read_text('utf-8')}"

    def _log(self, command: str) -> Path:
        return self.folder / f".{uuid.uuid5(uuid.NAMESPACE_OID, command)}.log"


@contextmanager
def shell(folder: Path) -> Iterator[Shell]:
    mark = f"docs-{uuid.uuid4().hex}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    homes = {f"XDG_{kind}_HOME": str(folder / f".{kind.lower()}") for kind in ("CONFIG", "DATA")}  # not the user's own
    own = {"PATH": path, "PYTHONPATH": str(folder), "COLUMNS": "200", "TERM": "dumb", MARK_ENV: mark, **homes}
    opened = Shell(folder, {**os.environ, **own}, str(find_free_ports(1)[0]))
    try:
        yield opened
        wrong = opened.stop()
        left = kill_by_mark(mark)
        assert not wrong, "\n".join(wrong)
        assert not left, f"{left} processes were left behind"
    finally:
        kill_by_mark(mark)
        for process in opened.beside.values():
            process.wait()
