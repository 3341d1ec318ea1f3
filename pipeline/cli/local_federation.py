"""A whole federation on one machine, through the same commands that a lead and hospitals type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.errors import BadService
from pipeline.ops.child_processes import Kept, sweep
from pipeline.service.runtime.client import connect
from pipeline.service.runtime.serve import free_ports
from pipeline.service.storage.home import CoordinatorHome

SECONDS = 120.0  # for anything but a study itself


@dataclass
class Miniature:
    folder: Path
    children: dict[str, Kept] = field(default_factory=dict)  # by the name of their home

    @property
    def home(self) -> Path:
        return self.folder / "coordinator"

    @property
    def mark(self) -> str:
        return f"miniature-{self.folder.resolve()}"

    @property
    def url(self) -> str:
        return CoordinatorHome.open(self.home).url

    @property
    def token(self) -> str:
        return (self.home / "lead.token").read_text("utf-8").strip()

    def coordinate(self) -> None:
        told("coordinator", "init", self.home, "--port", free_ports(1)[0], "--name", "miniature")
        self.serve()

    def serve(self) -> None:
        self._start("coordinator", "serve", self.home, "--bind", "127.0.0.1")
        self.until(self._answers, "the coordinator")

    def enrol(self, site: str, *more: object) -> None:
        """A hospital makes its keys and enrols; its agent runs from then on. `more`: options of `site init`."""
        home = self.folder / site
        told("site", "init", home, "--site", site, "--dataset", f"{site}-data", "--epsilon", 8, *more)
        invitation = str(told("coordinator", "invite", site, "--home", self.home)["token"])
        self.join(site, invitation)
        self.until(lambda: (home / "membership.json").exists(), f"{site} to enrol")

    def join(self, site: str, invitation: str = "") -> None:
        """The invitation goes through the environment: arguments can be read by everybody on the machine."""
        first = ["--coordinator", self.url] if invitation else []
        self._start("site", "join", self.folder / site, *first, invited=invitation)

    def offer(self, study: str, sets: list[str]) -> str:
        """The run's name."""
        flags = [part for one in sets for part in ("--set", one)]
        return str(told("coordinator", "run", study, "--home", self.home, *flags)["id"])

    def approve(self, run: str, site: str) -> None:
        home = self.folder / site
        self.until(lambda: self._offered(home, run), f"the offer of {run} at {site}")
        told("site", "approve", home, run, "--officer", home / "officer.pem", "--yes")

    def look(self, run: str) -> dict[str, Any]:
        with connect(self.home) as client:
            found: dict[str, Any] = client.get(f"/api/runs/{run}")
        return found

    def until(self, what: Callable[[], bool], words: str, seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                raise BadService(f"waited {seconds:.0f} s for {words} in vain; logs are in {self.folder}")
            time.sleep(0.2)

    def close(self) -> None:
        for kept in self.children.values():
            with suppress(OSError):
                kept.process.terminate()
        for kept in self.children.values():
            kept.stop(5.0)
        sweep(self.mark)

    def _offered(self, home: Path, run: str) -> bool:
        return any(f'"run":"{run}"' in file.read_text("utf-8") for file in (home / "offers").glob("*.json"))

    def _answers(self) -> bool:
        if not self.children["coordinator"].alive:
            raise BadService(f"the coordinator ended at once: {self.children['coordinator'].log.read_text('utf-8')}")
        with suppress(BadService), connect(self.home) as client:
            return bool(client.get("/health"))
        return False

    def _start(self, *parts: object, invited: str = "") -> None:
        home = Path(str(parts[2]))
        env = {**os.environ, **({"HEMOFED_INVITATION": invited} if invited else {})}
        log = self.folder / f"{home.name}.log"
        self.children[home.name] = Kept.start(_command(*parts), self.folder, env, log, self.mark)


def _command(*parts: object) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli.main", *map(str, parts)]


def told(*parts: object) -> dict[str, Any]:
    """What a command of ours prints as JSON."""
    done = subprocess.run(_command(*parts, "--json"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadService(f"hemofed {' '.join(map(str, parts))}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
