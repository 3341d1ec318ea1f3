"""What a serving coordinator and working agents expose: ports, arguments, logs."""

from __future__ import annotations

import json

import psutil
import pytest

from pipeline.ops.child_processes import MARK_ENV
from pipeline.service.storage.home import CoordinatorHome
from tests.integration.chaos_federation import SITES, ChaosFederation
from tests.integration.exposure import assert_no_secret_exposed, list_listening_sockets, reachable_from_outside

pytest.importorskip("nvflare")
pytestmark = pytest.mark.slow


def test_federation_exposes_one_port_and_no_secret(federation: ChaosFederation) -> None:
    local = federation.local
    run = federation.start_run()
    federation.wait_for_round(run, 2)
    argv, sockets = {}, []
    for process in psutil.process_iter():
        try:
            if local.process_mark in process.environ().get(MARK_ENV, "").split(":"):
                argv[process.pid] = process.cmdline()
                sockets += list_listening_sockets(process)
        except psutil.Error:
            continue
    assert len(argv) >= 12  # service, server, agents, clients, and the run's process at each
    assert not reachable_from_outside(sockets)
    assert CoordinatorHome.open(local.home).port in [port for _, _, port in sockets]
    agent_pids = {local.children[site].pid for site in SITES}
    assert not [
        pid for pid, _, _ in sockets if pid in agent_pids
    ]  # a hospital's firewall may block all incoming traffic
    federation.wait_for_end(run)
    memberships = [json.loads((local.folder / site / "membership.json").read_text()) for site in SITES]
    other_secrets = {local.token, *(membership["credential"] for membership in memberships)}
    assert_no_secret_exposed(local.folder, argv.values(), other_secrets)
