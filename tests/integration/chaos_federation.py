"""What chaos tests look at: a small federation, its processes by what they do, and the run that it should have had."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from pipeline.cli.local_federation import LocalFederation, run_cli_json
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.tensor_io import load_tensors
from pipeline.ops.child_processes import MARK_ENV
from pipeline.runs.simulation import run_simulation as simulate
from pipeline.study.toml_file import parse_study

SITES = ("site-01", "site-02", "site-03")
ROUNDS = 14
# all three have to be in every round, so that the result is known however often something dies
STUDY = f"""
name = "chaos"
rounds = {ROUNDS}
data = {{ name = "moons", val = 0.1, points = 420 }}
model = "moons_net"
sites = {{ count = 3 }}
local = {{ lr = 0.1, batch = 20 }}
trainer = "sequential"
waiting = {{ quorum = 3 }}
evaluation = {{ where = "sites" }}
"""
CLIENT, WORKER = "client_train", "worker_process"
SERVER, RUNNER = "server_train", "runner_process"


@dataclass
class World:
    small: LocalFederation
    study: Path

    def begin(self, *sets: str) -> str:
        run = self.small.offer_study(str(self.study), list(sets))
        for site in SITES:
            self.small.approve_run(run, site)
        return run

    def round(self, run: str) -> int:
        rounds = RunFolder(self.small.home / "runs" / run).load_rounds()
        return int(rounds[-1]["round"]) if rounds else -1

    def reach(self, run: str, round: int) -> None:
        self.small.wait_until(
            lambda: self.round(run) >= round, f"round {round} of {run}: {self.small.get_run(run)['reason']}", 180
        )

    def finish(self, run: str, seconds: float = 240) -> None:
        def over() -> bool:
            try:
                seen = self.small.get_run(run)
            except Exception:  # the coordinator may just be gone
                return False
            assert seen["state"] not in ("failed", "stopped"), seen["reason"]
            return bool(seen["state"] == "finished")

        self.small.wait_until(over, f"{run} to finish", seconds)

    def processes(self, what: str, site: str | None = None) -> list[psutil.Process]:
        """Of this federation, by the module that they run, and by whose home they belong to."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = self.small.process_mark in process.environ().get(MARK_ENV, "").split(":")
                if (
                    ours
                    and process.status() != psutil.STATUS_ZOMBIE
                    and any(what in part for part in process.cmdline())
                ):
                    home = process.environ().get("HEMOFED_SITE", "")
                    if site is None or Path(home).name == site:
                        found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def die(self, name: str) -> None:
        """kill -9 of an agent or of the coordinator itself."""
        process = self.small.children[name].process
        process.kill()
        process.wait()

    def kill(self, what: str, site: str | None = None) -> None:
        victims = self.processes(what, site)
        assert victims, f"there is no {what} to kill"
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)

    def nothing_is_left_over(self) -> None:
        """No job process, one client a site, one server."""

        def calm() -> bool:
            counts = [len(self.processes(what)) for what in (WORKER, RUNNER, CLIENT, SERVER)]
            return counts == [0, 0, 3, 1]

        self.small.wait_until(calm, "left-over processes to go", 60)

    def as_if_nothing_had_happened(self, run: str, tmp_path: Path, *sets: str) -> None:
        """Every round once, all sites in each, and the very model of an undisturbed run."""
        from pipeline.study.toml_file import parse_override

        folder = RunFolder.open(self.small.home / "runs" / run)
        lines = [json.loads(line) for line in (folder.path / "rounds.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == list(range(ROUNDS + 1))
        assert all(sorted(line["counted"]) == list(SITES) for line in lines[1:])
        assert not any(line["void"] for line in lines)
        study = parse_study(STUDY, "chaos", dict(map(parse_override, sets)))
        here = RunFolder.create(tmp_path / "undisturbed", study)
        simulate(study, here)
        got = load_tensors(folder.path / "models" / "global.safetensors")[1]["weights"]
        want = load_tensors(here.path / "models" / "global.safetensors")[1]["weights"]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def ledgers_verify(self) -> None:
        for site in SITES:
            receipts = self.small.home / "receipts"
            anchor = ["--anchor", receipts] if any(receipts.glob("*.json")) else []
            assert run_cli_json("site", "ledger", "verify", self.small.folder / site, *anchor)["ok"]
