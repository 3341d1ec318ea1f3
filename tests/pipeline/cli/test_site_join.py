"""`hemofed site join`, `status` and `leave` against a coordinator played over real TLS."""

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
from privacy.ledger.records import LedgerBudget
from sites.governance.home import SiteHome
from tests.support.fake_coordinator import FakeCoordinator, certificate_authority, serve_tls, wait_for
from tests.support.studies import moons_study

TOKEN = "secret-token-0123"


@pytest.fixture
def home(tmp_path):
    return SiteHome.create(tmp_path / "home", "north", "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5))


@pytest.fixture
def coordinator():
    coordinator = FakeCoordinator()
    coordinator.invitations = {TOKEN: "north"}
    return coordinator


@pytest.fixture
def url(coordinator, tmp_path, monkeypatch):
    monkeypatch.setenv(INVITATION_VARIABLE, format_invitation(TOKEN, certificate_authority().pem))
    with serve_tls(coordinator.app, tmp_path) as port:
        yield f"https://localhost:{port}"


def said(capsys) -> dict:
    return json.loads(capsys.readouterr().out)


def test_join_once_status_and_leave(home, coordinator, url, capsys, monkeypatch):
    ours = create_offer("run-1", moons_study(), {"north": keys.public_hex(home.key)}, keys.public_hex(coordinator.key))
    coordinator.offers = [ours.model_dump()]
    join_command(home.path, f"{url}/", None, systemd=False, once=True, json=True)
    assert INVITATION_VARIABLE not in os.environ
    first = said(capsys)
    assert first["membership"]["url"] == url
    assert [(o["run"], o["state"]) for o in first["offers"]] == [("run-1", "pending")]
    join_command(home.path, None, None, systemd=False, once=True, json=False)  # goes on without an invitation
    assert "connected to test-coordinator" in capsys.readouterr().out
    assert len(coordinator.enrolments) == 1

    status_command(home.path, json=False)
    shown = capsys.readouterr().out
    for words in (
        "north: smears",
        "does not run",
        "coordinator, https://localhost",
        "spent epsilon 0 of 8",
        "run-1",
        "pending",
    ):
        assert words in shown
    assert coordinator.credential not in shown

    with pytest.raises(RunFolderError, match="belongs to https"):
        join_command(home.path, "https://other:1", None, systemd=False, once=True, json=False)
    with pytest.raises(RunFolderError, match="home of north"):
        join_command(home.path, None, "south", systemd=False, once=True, json=False)

    kept = {name: (home.path / name).read_bytes() for name in ("agent.pem", "ledger.jsonl", "salt")}
    leave_command(home.path, json=True)
    assert said(capsys)["told"]
    assert coordinator.has_left
    assert not {"kit", "membership.json"} & {p.name for p in home.path.iterdir()}
    assert kept == {name: (home.path / name).read_bytes() for name in kept}
    status_command(home.path, json=True)
    assert said(capsys)["membership"] is None
    with pytest.raises(RunFolderError, match="belongs to no coordinator"):
        leave_command(home.path, json=False)


def test_leaving_works_without_the_coordinator_and_says_so(home, coordinator, url, capsys):
    join_command(home.path, url, "north", systemd=False, once=True, json=True)
    coordinator.error_statuses = [500, 500]
    with pytest.raises(ServiceError, match="tell the lead"):
        leave_command(home.path, json=False)
    assert not (home.path / "membership.json").exists()


def test_what_is_missing_is_named(home, url, monkeypatch, capsys):
    with pytest.raises(RunFolderError, match="name it: hemofed site join"):
        join_command(home.path, None, None, systemd=False, once=True, json=False)
    monkeypatch.delenv(INVITATION_VARIABLE)
    read, write = os.pipe()
    os.close(write)
    with os.fdopen(read) as empty:
        monkeypatch.setattr("sys.stdin", empty)
        with pytest.raises(KeyFileError, match="not an invitation"):
            join_command(home.path, url, None, systemd=False, once=True, json=False)
    status_command(home.path, json=False)
    assert "never ran" in capsys.readouterr().out
    join_command(home.path, None, None, systemd=True, once=False, json=False)
    assert f"site join {home.path}" in capsys.readouterr().out


def test_the_agent_runs_in_the_foreground_until_it_is_told_to_stop(home, coordinator, url, tmp_path):
    """With FLARE's own client as child: it finds no server here, and nothing of it may stay."""
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
    assert "the agent of north runs" in out
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children)
    assert json.loads((home.path / "status.json").read_text())["state"] == "stopped"
