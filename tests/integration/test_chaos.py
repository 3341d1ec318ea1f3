"""Whatever dies, the study completes, no round is lost or counted twice, and no process is left."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from tests.integration.chaos_federation import CLIENT, RUNNER, SERVER, SITES, WORKER, World

pytestmark = pytest.mark.slow
CHANCE = random.Random(os.environ.get("HEMOFED_CHAOS", "6"))  # another seed: other moments


def some_round() -> int:
    return CHANCE.randint(1, 8)


def agent_of_a_site(world: World) -> None:
    site = CHANCE.choice(SITES)
    world.die(site)
    world.small.wait_until(lambda: not world.processes("nvflare", site), "what the agent had started to go with it", 20)
    world.small.start_agent(site)  # as systemd would


def client_of_a_site(world: World) -> None:
    world.kill(CLIENT, CHANCE.choice(SITES))


def worker_of_a_site(world: World) -> None:
    world.kill(WORKER, CHANCE.choice(SITES))


def coordinator(world: World) -> None:
    world.die("coordinator")
    world.small.wait_until(
        lambda: not [*world.processes(SERVER), *world.processes(RUNNER)], "what the coordinator had started to go", 20
    )
    world.small.serve_coordinator()


def server_of_flare(world: World) -> None:
    world.kill(SERVER)


def runner(world: World) -> None:
    world.kill(RUNNER)


KILLED = [agent_of_a_site, client_of_a_site, worker_of_a_site, coordinator, server_of_flare, runner]


@pytest.mark.parametrize("strike", KILLED, ids=lambda strike: strike.__name__)
def test_killed(strike, world: World, tmp_path: Path) -> None:
    run = world.begin()
    world.reach(run, some_round())
    time.sleep(CHANCE.uniform(0, 1))
    strike(world)
    world.finish(run)
    world.as_if_nothing_had_happened(run, tmp_path)
    world.nothing_is_left_over()
    world.ledgers_verify()


@pytest.mark.parametrize("seconds", [4, 40])
def test_a_site_that_is_paused(seconds: int, world: World, tmp_path: Path) -> None:
    """Shortly: it is waited for. For long: the run rests, and takes the site in with a new process."""
    run = world.begin()
    world.reach(run, some_round())
    (worker,) = world.processes(WORKER, CHANCE.choice(SITES))
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(seconds)
    if worker.is_running():
        os.kill(worker.pid, signal.SIGCONT)
    world.finish(run)
    world.as_if_nothing_had_happened(run, tmp_path)
    world.nothing_is_left_over()
