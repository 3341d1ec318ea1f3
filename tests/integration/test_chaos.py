"""Any process may be killed or paused: the study completes, every round counts once, and no process is left over."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from tests.integration.chaos_federation import CLIENT, RUNNER, SERVER, SITES, WORKER, ChaosFederation

pytestmark = pytest.mark.slow
RNG = random.Random(os.environ.get("HEMOFED_CHAOS", "6"))  # another seed kills at other moments


def random_round() -> int:
    return RNG.randint(1, 8)


def kill_agent(federation: ChaosFederation) -> None:
    site = RNG.choice(SITES)
    federation.kill_child(site)
    federation.local.wait_until(
        lambda: not federation.find_processes("nvflare", site), "the agent's child processes to end with it", 20
    )
    federation.local.start_agent(site)  # as systemd would


def kill_flare_client(federation: ChaosFederation) -> None:
    federation.kill_processes(CLIENT, RNG.choice(SITES))


def kill_worker(federation: ChaosFederation) -> None:
    federation.kill_processes(WORKER, RNG.choice(SITES))


def kill_coordinator(federation: ChaosFederation) -> None:
    federation.kill_child("coordinator")
    federation.local.wait_until(
        lambda: not [*federation.find_processes(SERVER), *federation.find_processes(RUNNER)],
        "the coordinator's child processes to end with it",
        20,
    )
    federation.local.serve_coordinator()


def kill_flare_server(federation: ChaosFederation) -> None:
    federation.kill_processes(SERVER)


def kill_runner(federation: ChaosFederation) -> None:
    federation.kill_processes(RUNNER)


KILLS = [kill_agent, kill_flare_client, kill_worker, kill_coordinator, kill_flare_server, kill_runner]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.__name__)
def test_run_survives_a_killed_process(kill, federation: ChaosFederation, tmp_path: Path) -> None:
    run = federation.start_run()
    federation.wait_for_round(run, random_round())
    time.sleep(RNG.uniform(0, 1))
    kill(federation)
    federation.wait_for_end(run)
    federation.assert_equals_undisturbed_run(run, tmp_path)
    federation.assert_no_leftover_processes()
    federation.assert_ledgers_verify()


@pytest.mark.parametrize("seconds", [4, 40])
def test_run_survives_a_paused_site(seconds: int, federation: ChaosFederation, tmp_path: Path) -> None:
    """The run waits for a site that is paused briefly. After a long pause it halts, and resumes with a new worker."""
    run = federation.start_run()
    federation.wait_for_round(run, random_round())
    (worker,) = federation.find_processes(WORKER, RNG.choice(SITES))
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(seconds)
    if worker.is_running():
        os.kill(worker.pid, signal.SIGCONT)
    federation.wait_for_end(run)
    federation.assert_equals_undisturbed_run(run, tmp_path)
    federation.assert_no_leftover_processes()
