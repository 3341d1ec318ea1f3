"""`hemofed site join | status | leave` against a fake coordinator over real TLS."""

import json
import os
import signal
import subprocess
import sys

import pytest

from pipeline.cli.commands.site.join import INVITATION_VARIABLE, join_command, leave_command, status_command
from pipeline.core.errors import KeyFileError, RunFolderError, ServiceError
from pipeline.protocol.invitations import format_invitation
from pipeline.study.offer import create_offer
from privacy.ledger import keys
from tests.support.fake_coordinator import (
    INVITATION_TOKEN,
    FakeCoordinator,
    certificate_authority,
    make_site_home,
    serve_tls,
)
from tests.support.machine import is_running, wait_for
from tests.support.studies import moons_study


@pytest.fixture
def home(tmp_path):
    return make_site_home(tmp_path)


@pytest.fixture
def coordinator():
    return FakeCoordinator()


@pytest.fixture
def url(coordinator, tmp_path, monkeypatch):
    monkeypatch.setenv(INVITATION_VARIABLE, format_invitation(INVITATION_TOKEN, certificate_authority().pem))
    with serve_tls(coordinator.app, tmp_path) as port:
        yield f"https://localhost:{port}"


def printed_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_join_once_status_and_leave(home, coordinator, url, capsys, monkeypatch):
    site_keys = {"north": keys.public_hex(home.agent_key)}
    offer = create_offer("run-1", moons_study(), site_keys, keys.public_hex(coordinator.key))
    coordinator.offers = [offer.model_dump()]
    join_command(home.path, f"{url}/", None, systemd=False, once=True, json=True)
    assert INVITATION_VARIABLE not in os.environ
    status = printed_json(capsys)
    assert status["membership"]["url"] == url
    assert [(o["run"], o["state"]) for o in status["offers"]] == [("run-1", "pending")]
    join_command(home.path, None, None, systemd=False, once=True, json=False)  # needs no invitation again
    assert "connected to test-coordinator" in capsys.readouterr().out
    assert len(coordinator.enrolments) == 1

    status_command(home.path, json=False)
    output = capsys.readouterr().out
    for phrase in (
        "north: smears",
        "not running",
        "coordinator, https://localhost",
        "spent epsilon 0 of 8",
        "run-1",
        "pending",
    ):
        assert phrase in output
    assert coordinator.credential not in output

    with pytest.raises(RunFolderError, match="is enrolled with https"):
        join_command(home.path, "https://other:1", None, systemd=False, once=True, json=False)
    with pytest.raises(RunFolderError, match="home of north"):
        join_command(home.path, None, "south", systemd=False, once=True, json=False)

    kept_files = {name: (home.path / name).read_bytes() for name in ("agent.pem", "ledger.jsonl", "salt")}
    leave_command(home.path, json=True)
    assert printed_json(capsys)["told"]
    assert coordinator.has_left
    assert not {"kit", "membership.json"} & {p.name for p in home.path.iterdir()}
    assert kept_files == {name: (home.path / name).read_bytes() for name in kept_files}
    status_command(home.path, json=True)
    assert printed_json(capsys)["membership"] is None
    with pytest.raises(RunFolderError, match="belongs to no coordinator"):
        leave_command(home.path, json=False)


def test_leave_reports_that_the_coordinator_was_not_notified(home, coordinator, url, capsys):
    join_command(home.path, url, "north", systemd=False, once=True, json=True)
    coordinator.error_statuses = [500, 500]
    with pytest.raises(ServiceError, match="ask the study lead to remove the site"):
        leave_command(home.path, json=False)
    assert not (home.path / "membership.json").exists()


def test_missing_address_and_invitation_are_named(home, url, monkeypatch, capsys):
    with pytest.raises(RunFolderError, match="give its address: hemofed site join"):
        join_command(home.path, None, None, systemd=False, once=True, json=False)
    monkeypatch.delenv(INVITATION_VARIABLE)
    read, write = os.pipe()
    os.close(write)
    with os.fdopen(read) as empty:
        monkeypatch.setattr("sys.stdin", empty)
        with pytest.raises(KeyFileError, match="not an invitation"):
            join_command(home.path, url, None, systemd=False, once=True, json=False)
    status_command(home.path, json=False)
    assert "never started" in capsys.readouterr().out
    join_command(home.path, None, None, systemd=True, once=False, json=False)
    assert f"site join {home.path}" in capsys.readouterr().out


def test_agent_runs_until_sigint_and_stops_its_child_processes(home, coordinator, url, tmp_path):
    """The child is the real FLARE client; it finds no server, and none of its processes may remain."""
    import psutil

    code = "import sys; from pathlib import Path; from pipeline.cli.commands.site.join import join_command; join_command(Path(sys.argv[1]), sys.argv[2], None, False, False, False)"
    process = subprocess.Popen([sys.executable, "-c", code, str(home.path), url], stdout=subprocess.PIPE, text=True)
    try:
        children = wait_for(lambda: coordinator.heartbeats and psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "is enrolled with test-coordinator" in out
    assert "the agent of north is running" in out
    assert not any(map(is_running, children))
    assert json.loads((home.path / "status.json").read_text())["state"] == "stopped"
