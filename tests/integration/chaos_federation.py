"""A small federation whose processes chaos tests kill and stop, compared with an undisturbed run of the same study."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from pipeline.cli.local_federation import LocalFederation, run_cli_json
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.tensor_io import load_tensors
from pipeline.flare.constants import SITE_HOME_ENV
from pipeline.ops.child_processes import MARK_ENV
from pipeline.records.round_record import ROUNDS_FILE, RoundRecord
from pipeline.runs.simulation import run_simulation
from pipeline.study.toml_file import parse_override, parse_study

SITES = ("site-01", "site-02", "site-03")
ROUNDS = 14
# with a quorum of all sites every round has the same replies, so the result does not depend on what was killed
STUDY = f"""
name = "chaos"
rounds = {ROUNDS}
data = {{ name = "moons", val = 0.1, points = 420 }}
model = "moons_net"
sites = {{ count = 3 }}
local = {{ lr = 0.1, batch_size = 20 }}
trainer = "sequential"
round = {{ quorum = 3 }}
evaluation = {{ evaluate_at = "sites" }}
"""
# modules of the processes: FLARE's client and a run's worker at a site, FLARE's server and a run's runner at the coordinator
CLIENT, WORKER = "client_train", "worker_process"
SERVER, RUNNER = "server_train", "runner_process"


@dataclass
class ChaosFederation:
    local: LocalFederation
    study_path: Path

    def start_run(self, *overrides: str) -> str:
        """Offers the study, approves it at all sites, and returns the run's name."""
        run = self.local.offer_study(str(self.study_path), list(overrides))
        for site in SITES:
            self.local.approve_run(run, site)
        return run

    def run_path(self, run: str) -> Path:
        return self.local.home / "runs" / run

    def last_round(self, run: str) -> int:
        """-1 before the record of round 0."""
        records = RunFolder(self.run_path(run)).load_rounds()
        return records[-1].round if records else -1

    def wait_for_round(self, run: str, round_number: int) -> None:
        description = f"round {round_number} of {run}: {self.local.get_run(run)['reason']}"
        self.local.wait_until(lambda: self.last_round(run) >= round_number, description, 180)

    def wait_for_end(self, run: str, seconds: float = 240) -> None:
        def is_finished() -> bool:
            try:
                run_info = self.local.get_run(run)
            except Exception:  # the coordinator may be down at this moment
                return False
            assert run_info["state"] not in ("failed", "stopped"), run_info["reason"]
            return bool(run_info["state"] == "finished")

        self.local.wait_until(is_finished, f"{run} to finish", seconds)

    def find_processes(self, module: str, site: str | None = None) -> list[psutil.Process]:
        """Processes of this federation that run the module; `site`: only those of its home."""
        processes = []
        for process in psutil.process_iter():
            try:
                is_ours = self.local.process_mark in process.environ().get(MARK_ENV, "").split(":")
                if (
                    is_ours
                    and process.status() != psutil.STATUS_ZOMBIE
                    and any(module in part for part in process.cmdline())
                ):
                    home = process.environ().get(SITE_HOME_ENV, "")
                    if site is None or Path(home).name == site:
                        processes.append(process)
            except (psutil.Error, OSError):
                continue
        return processes

    def kill_child(self, name: str) -> None:
        """kill -9 of the agent of this site, or of the coordinator's service."""
        process = self.local.children[name].process
        process.kill()
        process.wait()

    def kill_processes(self, module: str, site: str | None = None) -> None:
        processes = self.find_processes(module, site)
        assert processes, f"there is no {module} to kill"
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)

    def restart_agent(self, site: str, **env: str) -> None:
        """`env`: additional environment variables of the new agent."""
        self.local.children[site].stop(5)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            self.local.start_agent(site)

    def assert_no_leftover_processes(self) -> None:
        """No process of a run, one client per site, one server."""

        def is_idle() -> bool:
            counts = [len(self.find_processes(module)) for module in (WORKER, RUNNER, CLIENT, SERVER)]
            return counts == [0, 0, 3, 1]

        self.local.wait_until(is_idle, "leftover processes to end", 60)

    def assert_equals_undisturbed_run(self, run: str, tmp_path: Path, *overrides: str) -> None:
        """Every round is recorded once, with all sites, and the model is that of a simulation."""
        folder = RunFolder.open(self.run_path(run))
        records = [
            RoundRecord.model_validate_json(line) for line in (folder.path / ROUNDS_FILE).read_text().splitlines()
        ]
        assert [record.round for record in records] == list(range(ROUNDS + 1))
        assert all(sorted(record.accepted) == list(SITES) for record in records[1:])
        assert not any(record.void for record in records)
        study = parse_study(STUDY, "chaos", dict(map(parse_override, overrides)))
        simulated = RunFolder.create(tmp_path / "undisturbed", study)
        run_simulation(study, simulated)
        actual = load_tensors(folder.path / "models" / "global.safetensors")[1]["weights"]
        expected = load_tensors(simulated.path / "models" / "global.safetensors")[1]["weights"]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    def assert_ledgers_verify(self) -> None:
        for site in SITES:
            receipts = self.local.home / "receipts"
            anchor = ["--anchor", receipts] if any(receipts.glob("*.json")) else []
            assert run_cli_json("site", "ledger", "verify", self.local.folder / site, *anchor)["ok"]
