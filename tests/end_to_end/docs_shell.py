"""A shell that runs the commands of one page of the documentation; its background commands end with the page."""

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
class DocsShell:
    """Keeps environment variables and background processes from one command to the next."""

    folder: Path
    env: dict[str, str]
    port: str
    hemofed_command: Path  # for commands in the foreground; those in the background are real processes
    background: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # command -> its process

    def run(self, command: str, timeout: float | None) -> tuple[int, str]:
        """The exit code, and stdout followed by stderr."""
        variables = self.folder / ".variables"
        script = f'set -a\n{command}\nstatus=$?\nset +a\nenv -0 > "{variables}"\nexit $status'
        completed = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.env | {"PATH": f"{self.hemofed_command.parent}{os.pathsep}{self.env['PATH']}"},
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
        if variables.exists():
            read = dict(line.split("=", 1) for line in variables.read_text("utf-8").split("\0") if line)
            self.env = read | {"PATH": self.env["PATH"]}
            variables.unlink()
        return completed.returncode, completed.stdout + completed.stderr

    def start(self, command: str) -> None:
        with self._log_path(command).open("wb") as log:
            self.background[command] = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ended_commands(self) -> list[str]:
        return [command for command, process in self.background.items() if process.poll() is not None]

    def stop(self) -> list[str]:
        """Terminates the background commands, and describes those that had ended early or failed."""
        problems = [f"had ended: {self.read_output(command)}" for command in self.ended_commands()]
        for process in self.background.values():
            process.terminate()
        for command, process in self.background.items():
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            problems += [f"ended with {code}: {self.read_output(command)}"] if code else []
        return problems

    def read_output(self, command: str) -> str:
        """The output of a background command."""
        return f"$ {command} &\n{self._log_path(command).read_text('utf-8')}"

    def _log_path(self, command: str) -> Path:
        return self.folder / f".{uuid.uuid5(uuid.NAMESPACE_OID, command)}.log"


@contextmanager
def open_docs_shell(folder: Path, hemofed_command: Path) -> Iterator[DocsShell]:
    mark = f"docs-{uuid.uuid4().hex}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    homes = {f"XDG_{kind}_HOME": str(folder / f".{kind.lower()}") for kind in ("CONFIG", "DATA")}  # not the user's own
    own = {"PATH": path, "PYTHONPATH": str(folder), "COLUMNS": "200", "TERM": "dumb", MARK_ENV: mark, **homes}
    shell = DocsShell(folder, {**os.environ, **own}, str(find_free_ports(1)[0]), hemofed_command)
    try:
        yield shell
        problems = shell.stop()
        num_leftover = kill_by_mark(mark)
        assert not problems, "\n".join(problems)
        assert not num_leftover, f"{num_leftover} processes were left over"
    finally:
        kill_by_mark(mark)
        for process in shell.background.values():
            process.wait()
