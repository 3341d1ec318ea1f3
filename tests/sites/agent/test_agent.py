"""Site agents against a fake coordinator over real TLS, with a child process instead of FLARE's client."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import psutil
import pytest
import torch
from safetensors.torch import save

from pipeline.core.errors import RunFolderError, ServiceError
from pipeline.ops.child_processes import kill_by_mark
from pipeline.protocol.invitations import format_invitation
from pipeline.study.offer import StudyOffer, create_offer
from privacy.ledger import keys
from sites.agent.agent import SiteAgent, process_mark
from sites.agent.enrolment import enrol_site
from sites.governance.approvals import approve_offer, revoke_approval
from sites.governance.home import SiteHome
from sites.governance.settings import ResourceLimits, SiteSettings
from tests.support.fake_coordinator import (
    INVITATION_TOKEN,
    FakeCoordinator,
    certificate_authority,
    make_site_home,
    serve_tls,
)
from tests.support.machine import is_running, wait_for
from tests.support.studies import moons_study

CHILD_CODE = "import json, os, time; open('child.tmp', 'w').write(json.dumps([os.getpid(), dict(os.environ)])); os.rename('child.tmp', 'child'); time.sleep(600)"
AGENT_CODE = """
import signal, sys, threading
from pathlib import Path
from sites.agent.agent import SiteAgent
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
argv = [sys.executable, "-m", "pipeline.ops.child_processes", "child_module"]
SiteAgent(Path(sys.argv[1]), lambda home, site: argv, heartbeat_seconds=0.2).run(stop)
"""


def make_child_argv(home, site):
    return [sys.executable, "-c", CHILD_CODE]


@pytest.fixture
def coordinator():
    return FakeCoordinator()


@pytest.fixture
def home(coordinator, tmp_path):
    home = make_site_home(tmp_path)
    SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e-3, max_cores=1)).save(home.path)
    with serve_tls(coordinator.app, tmp_path) as port:
        enrol_site(
            home, f"https://localhost:{port}", "north", format_invitation(INVITATION_TOKEN, certificate_authority().pem)
        )
    coordinator.port = port
    yield home
    kill_by_mark(process_mark(home.path))


@pytest.fixture
def online(coordinator, home, tmp_path):
    """Serves the coordinator again on the port in the site's membership."""
    with serve_tls(coordinator.app, tmp_path, coordinator.port):
        yield


@contextlib.contextmanager
def running_agent(home: SiteHome, heartbeat_seconds=0.1):
    lines: list[str] = []
    agent, stop = SiteAgent(home.path, make_child_argv, heartbeat_seconds, lines.append), threading.Event()
    thread = threading.Thread(target=agent.run, args=(stop,))
    thread.start()
    try:
        yield agent, lines
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def read_status_file(home: SiteHome) -> dict:
    file = home.path / "status.json"
    return json.loads(file.read_text()) if file.exists() else {}


def make_offer(home: SiteHome, coordinator: FakeCoordinator, run="run-1", **changes) -> StudyOffer:
    offer = create_offer(
        run, moons_study(), {"north": keys.public_hex(home.agent_key)}, keys.public_hex(coordinator.key)
    )
    return offer.model_copy(update=changes)


def wait_for_child(home: SiteHome) -> tuple[psutil.Process, dict]:
    wait_for((home.path / "child").exists)
    pid, env = json.loads((home.path / "child").read_text())
    return psutil.Process(pid), env


def test_offers_are_stored_and_approval_notices_sent(home, coordinator, online):
    own_offer, later_offer = make_offer(home, coordinator), make_offer(home, coordinator, "run-2")
    foreign_offers = [
        make_offer(home, coordinator, "not-ours", site_keys={"south": "a" * 64}),
        make_offer(home, coordinator, "old-key", site_keys={"north": "a" * 64}),
        make_offer(home, coordinator, "impostor", coordinator_key="a" * 64),
    ]
    coordinator.offers = [o.model_dump() for o in (own_offer, *foreign_offers)]
    officer = keys.load_key(home.path / "officer.pem")
    with running_agent(home) as (_, lines):
        wait_for(lambda: read_status_file(home).get("pending_offers"))
        assert [o["run"] for o in read_status_file(home)["pending_offers"]] == ["run-1"]
        assert [f.stem for f in (home.path / "offers").iterdir()] == [own_offer.digest]
        assert sum("run-1 is offered" in line for line in lines) == 1
        assert [
            sum(f"ignored an offer of {name}" in line for line in lines) for name in ("not-ours", "old-key", "impostor")
        ] == [1, 1, 1]
        approve_offer(SiteHome.open(home.path), own_offer, officer, datetime.now(UTC) + timedelta(days=1))
        wait_for(lambda: coordinator.heartbeats[-1]["approvals"])
        (notice,) = coordinator.heartbeats[-1]["approvals"]
        assert (notice["run"], notice["offer"]) == ("run-1", own_offer.digest)
        wait_for(lambda: not read_status_file(home)["pending_offers"])
        revoke_approval(SiteHome.open(home.path), "run-1")
        wait_for(lambda: coordinator.heartbeats[-1]["revoked"])
        assert coordinator.heartbeats[-1]["approvals"] == []
        coordinator.offers = [later_offer.model_dump()]
        wait_for(lambda: (home.path / "offers" / f"{later_offer.digest}.json").exists())
        coordinator.offers = []
        wait_for(lambda: len(list((home.path / "offers").iterdir())) == 1)  # an offer that was approved once stays
    assert read_status_file(home)["state"] == "stopped"


def test_agent_reconnects_after_a_coordinator_outage_and_keeps_its_child(home, coordinator, tmp_path):
    with running_agent(home) as (agent, lines):
        with serve_tls(coordinator.app, tmp_path, coordinator.port):
            wait_for(lambda: read_status_file(home).get("state") == "connected")
            process, env = wait_for_child(home)
        wait_for(lambda: read_status_file(home)["state"] == "disconnected")
        assert read_status_file(home)["problem"]
        num_heartbeats = len(coordinator.heartbeats)
        with serve_tls(coordinator.app, tmp_path, coordinator.port):
            wait_for(lambda: len(coordinator.heartbeats) > num_heartbeats)
            wait_for(lambda: read_status_file(home)["state"] == "connected")
            assert read_status_file(home)["problem"] == ""
        assert is_running(process)
        assert env["OMP_NUM_THREADS"] == env["HEMOFED_CORES"] == "1"
        assert sum("connected to test-coordinator" in line for line in lines) == 2
        assert agent.status.flare == "running"
    assert not is_running(process)


def test_a_killed_child_process_is_restarted(home, online):
    with running_agent(home) as (_, lines):
        first, _ = wait_for_child(home)
        (home.path / "child").unlink()
        first.kill()
        second, _ = wait_for_child(home)
        assert second.pid != first.pid
        assert any("ended with code -9" in line for line in lines)
    assert not is_running(second)


def test_access_denied_stops_the_child_process(home, coordinator, online):
    with running_agent(home):
        process, _ = wait_for_child(home)
        coordinator.credential = "another"
        wait_for(lambda: read_status_file(home)["state"] == "denied")
        wait_for(lambda: not is_running(process))
        assert "the credential is missing or wrong" in read_status_file(home)["problem"]
        assert "the-credential" not in (home.path / "log" / "agent.jsonl").read_text() + json.dumps(
            read_status_file(home)
        )


def test_models_of_finished_runs_are_downloaded_once(home, coordinator, online):
    model = save({"weights": torch.ones(10)})
    coordinator.models = {("done", "global"): model, ("done", "bad"): b"nonsense", ("done", "own"): model}
    coordinator.runs = [
        {"id": "done", "state": "finished", "models": ["global", "bad", "own"]},
        {"id": "going", "state": "running", "models": ["global"]},
    ]
    with running_agent(home) as (_, lines):
        wait_for(lambda: read_status_file(home).get("models") == ["done/global"])
        wait_for(lambda: any("was deleted" in line for line in lines))
        num_heartbeats = len(coordinator.heartbeats)
        wait_for(lambda: len(coordinator.heartbeats) > num_heartbeats + 3)
        assert read_status_file(home)["run"] == "going"
    assert sorted(coordinator.downloads) == [("done", "bad"), ("done", "global")]
    assert (home.path / "models" / "done" / "global.safetensors").read_bytes() == model
    assert len(list((home.path / "models").rglob("*.*"))) == 1


def test_warnings_about_clock_version_and_disk_space(home, coordinator, online):
    SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e9)).save(home.path)
    coordinator.clock_offset = timedelta(minutes=9)
    coordinator.offers = [
        make_offer(home, coordinator, version="9.9").model_dump(),
        {"run": "future", "version": "10.0"},
    ]
    with running_agent(home):
        wait_for(lambda: len(read_status_file(home).get("warnings", [])) == 4)
        text = "\n".join(read_status_file(home)["warnings"])
        for words in ("9 minutes apart", "needs hemofed 9.9", "install hemofed==10.0", "must stay free"):
            assert words in text
        assert read_status_file(home)["flare"] == "off"
        assert not (home.path / "child").exists()
        wait_for(lambda: coordinator.heartbeats[-1]["status"]["warnings"] == 4)
    assert str(home.path) not in json.dumps(coordinator.heartbeats)  # no path of the site leaves it


def test_one_agent_per_home_and_a_single_heartbeat_with_once(home, coordinator, online):
    with running_agent(home):
        wait_for(lambda: read_status_file(home).get("state") == "connected")
        with pytest.raises(RunFolderError, match="already"):
            SiteAgent(home.path).run(threading.Event())
    num_heartbeats = len(coordinator.heartbeats)
    SiteAgent(home.path).run(threading.Event(), once=True)
    assert len(coordinator.heartbeats) == num_heartbeats + 1
    coordinator.error_statuses = [500]
    with pytest.raises(ServiceError, match="500"):
        SiteAgent(home.path).run(threading.Event(), once=True)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_no_child_process_outlives_the_agent(home, online, tmp_path, signal_number):
    (tmp_path / "child_module.py").write_text(CHILD_CODE)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    agent = subprocess.Popen([sys.executable, "-c", AGENT_CODE, str(home.path)], env=env)
    try:
        process, _ = wait_for_child(home)
        agent.send_signal(signal_number)
        assert agent.wait(20) == (0 if signal_number == signal.SIGTERM else -9)
        wait_for(lambda: not is_running(process))
    finally:
        agent.kill()
        agent.wait()
