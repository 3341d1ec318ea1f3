"""A federation on one machine, set up with the commands that a study lead and hospitals use."""

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

from pipeline.core.errors import ServiceError
from pipeline.ops.child_processes import ChildProcess, kill_by_mark
from pipeline.service.runtime.client import connect
from pipeline.service.runtime.serve import find_free_ports
from pipeline.service.storage.home import CoordinatorHome

TIMEOUT_SECONDS = 120.0  # for every step except the study itself


@dataclass
class LocalFederation:
    """A coordinator and site agents as child processes; their homes and logs are in `folder`."""

    folder: Path
    children: dict[str, ChildProcess] = field(default_factory=dict)  # name of the home -> process

    @property
    def home(self) -> Path:
        return self.folder / "coordinator"

    @property
    def process_mark(self) -> str:
        return f"local-federation-{self.folder.resolve()}"

    @property
    def url(self) -> str:
        return CoordinatorHome.open(self.home).url

    @property
    def token(self) -> str:
        return (self.home / "lead.token").read_text("utf-8").strip()

    def start_coordinator(self) -> None:
        options = ["--port", find_free_ports(1)[0], "--name", "local"]
        run_cli_json("coordinator", "init", self.home, *options)
        self.serve_coordinator()

    def serve_coordinator(self) -> None:
        self._start_child("coordinator", "serve", self.home, "--bind", "127.0.0.1")
        self.wait_until(self._is_coordinator_up, "the coordinator")

    def enrol_site(self, site: str, *init_options: object) -> None:
        """Creates the site's home, enrols the site and starts its agent. `init_options`: options of `site init`."""
        home = self.folder / site
        run_cli_json("site", "init", home, "--site", site, "--dataset", f"{site}-data", "--epsilon", 8, *init_options)
        invitation = str(run_cli_json("coordinator", "invite", site, "--home", self.home)["token"])
        self.start_agent(site, invitation)
        self.wait_until(lambda: (home / "membership.json").exists(), f"{site} to enrol")

    def start_agent(self, site: str, invitation: str = "") -> None:
        """The invitation is passed in the environment, because every user of the machine can read arguments."""
        coordinator_options = ["--coordinator", self.url] if invitation else []
        self._start_child("site", "join", self.folder / site, *coordinator_options, invitation=invitation)

    def offer_study(self, study: str, overrides: list[str]) -> str:
        """Returns the run's name."""
        override_options = [part for override in overrides for part in ("--set", override)]
        return str(run_cli_json("coordinator", "run", study, "--home", self.home, *override_options)["id"])

    def approve_run(self, run: str, site: str) -> None:
        home = self.folder / site
        self.wait_until(lambda: self._has_offer(home, run), f"the offer of {run} at {site}")
        run_cli_json("site", "approve", home, run, *["--officer", home / "officer.pem", "--yes"])

    def get_run(self, run: str) -> dict[str, Any]:
        with connect(self.home) as client:
            run_info: dict[str, Any] = client.get(f"/api/runs/{run}")
        return run_info

    def wait_until(self, condition: Callable[[], bool], description: str, seconds: float = TIMEOUT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"timed out after {seconds:.0f} s, waiting for {description}; the logs are in {self.folder}"
                )
            time.sleep(0.2)

    def close(self) -> None:
        for child in self.children.values():
            with suppress(OSError):
                child.process.terminate()
        for child in self.children.values():
            child.stop(5.0)
        kill_by_mark(self.process_mark)

    def _has_offer(self, home: Path, run: str) -> bool:
        return any(f'"run":"{run}"' in file.read_text("utf-8") for file in (home / "offers").glob("*.json"))

    def _is_coordinator_up(self) -> bool:
        if not self.children["coordinator"].is_alive:
            raise ServiceError(
                f"the coordinator ended during its start: {self.children['coordinator'].log_path.read_text('utf-8')}"
            )
        with suppress(ServiceError), connect(self.home) as client:
            return bool(client.get("/health"))
        return False

    def _start_child(self, *arguments: object, invitation: str = "") -> None:
        home = Path(str(arguments[2]))
        env = {**os.environ, **({"HEMOFED_INVITATION": invitation} if invitation else {})}
        log_path = self.folder / f"{home.name}.log"
        self.children[home.name] = ChildProcess.start(
            _cli_command(*arguments), self.folder, env, log_path, self.process_mark
        )


def _cli_command(*arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", "hemofed", *map(str, arguments)]


def run_cli_json(*arguments: object) -> dict[str, Any]:
    """Runs a hemofed command with --json, and returns what it prints."""
    completed = subprocess.run(_cli_command(*arguments, "--json"), capture_output=True, text=True, check=False)
    if completed.returncode:
        raise ServiceError(f"hemofed {' '.join(map(str, arguments))}: {completed.stderr.strip()}")
    reply: dict[str, Any] = json.loads(completed.stdout)
    return reply
