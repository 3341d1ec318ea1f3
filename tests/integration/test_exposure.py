"""What a coordinator that serves and agents that work let be seen of themselves."""

from __future__ import annotations

import json

import psutil
import pytest

from pipeline.ops.child_processes import MARK_ENV
from pipeline.service.storage.home import CoordinatorHome
from tests.integration.chaos_federation import SITES, World
from tests.integration.exposure import betrays_nothing, listening_of, outside

pytest.importorskip("nvflare")
pytestmark = pytest.mark.slow


def test_one_port_and_no_secret(world: World) -> None:
    run = world.begin()
    world.reach(run, 2)
    argv, listening = {}, []
    for process in psutil.process_iter():
        try:
            if world.small.process_mark in process.environ().get(MARK_ENV, "").split(":"):
                argv[process.pid] = process.cmdline()
                listening += listening_of(process)
        except psutil.Error:
            continue
    assert len(argv) >= 12  # service, server, agents, clients, and the job's process at each
    assert not outside(listening)
    front = CoordinatorHome.open(world.small.home).port
    assert front in [port for _, _, port in listening]
    agents = {world.small.children[site].pid for site in SITES}
    assert not [one for one in listening if one[0] in agents]  # a hospital's firewall may refuse whatever comes in
    world.finish(run)
    members = [json.loads((world.small.folder / site / "membership.json").read_text()) for site in SITES]
    betrays_nothing(world.small.folder, argv.values(), {world.small.token, *(one["credential"] for one in members)})
