"""Agents against a coordinator played over real TLS, with a real child process in the place of FLARE's client."""

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
from privacy.ledger.records import LedgerBudget
from sites.agent.agent import SiteAgent, process_mark
from sites.agent.enrolment import enrol_site
from sites.governance.approvals import approve_offer, revoke_approval
from sites.governance.home import SiteHome
from sites.governance.settings import ResourceLimits, SiteSettings
from tests.conftest import moons_study
from tests.support.fake_coordinator import Stage, authority, served, wait_for

CHILD = "import json, os, time; open('child.tmp', 'w').write(json.dumps([os.getpid(), dict(os.environ)])); os.rename('child.tmp', 'child'); time.sleep(600)"
TOKEN = "secret-token-0123"
AGENT = """
import signal, sys, threading
from pathlib import Path
from sites.agent.agent import Agent
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
Agent(Path(sys.argv[1]), lambda home, site: [sys.executable, "-m", "pipeline.ops.child_processes", "child_module"], every=0.2).run(stop)
"""


def argv(home, site):
    return [sys.executable, "-c", CHILD]


@pytest.fixture
def stage():
    played = Stage()
    played.invited = {TOKEN: "north"}
    return played


@pytest.fixture
def home(stage, tmp_path):
    made = SiteHome.create(tmp_path / "home", "north", "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5))
    SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e-3, max_cores=1)).save(made.path)
    with served(stage.app, tmp_path) as port:
        enrol_site(made, f"https://localhost:{port}", "north", format_invitation(TOKEN, authority().pem))
    stage.port = port
    yield made
    kill_by_mark(process_mark(made.path))


@pytest.fixture
def online(stage, home, tmp_path):
    """The coordinator serves again on the port that the site knows."""
    with served(stage.app, tmp_path, stage.port):
        yield


@contextlib.contextmanager
def running(home: SiteHome, every=0.1):
    lines: list[str] = []
    agent, stop = SiteAgent(home.path, argv, every, lines.append), threading.Event()
    thread = threading.Thread(target=agent.run, args=(stop,))
    thread.start()
    try:
        yield agent, lines
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def status(home: SiteHome) -> dict:
    file = home.path / "status.json"
    return json.loads(file.read_text()) if file.exists() else {}


def an_offer(home: SiteHome, stage: Stage, run="run-1", **changed) -> StudyOffer:
    made = create_offer(run, moons_study(), {"north": keys.public_hex(home.agent_key)}, keys.public_hex(stage.key))
    return made.model_copy(update=changed)


def child(home: SiteHome) -> tuple[psutil.Process, dict]:
    wait_for((home.path / "child").exists)
    pid, env = json.loads((home.path / "child").read_text())
    return psutil.Process(pid), env


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_offers_are_stored_approvals_told_and_withdrawals(home, stage, online):
    ours, later = an_offer(home, stage), an_offer(home, stage, "run-2")
    foreign = [
        an_offer(home, stage, "not-ours", sites={"south": "a" * 64}),
        an_offer(home, stage, "old-key", sites={"north": "a" * 64}),
        an_offer(home, stage, "impostor", coordinator="a" * 64),
    ]
    stage.offers = [o.model_dump() for o in (ours, *foreign)]
    officer = keys.load_key(home.path / "officer.pem")
    with running(home) as (_, lines):
        wait_for(lambda: status(home).get("waiting"))
        assert [w["run"] for w in status(home)["waiting"]] == ["run-1"]
        assert [f.stem for f in (home.path / "offers").iterdir()] == [ours.digest]
        assert sum("run-1 is offered" in line for line in lines) == 1
        assert [
            sum(f"{name} is put aside" in line for line in lines) for name in ("not-ours", "old-key", "impostor")
        ] == [1, 1, 1]
        approve_offer(SiteHome.open(home.path), ours, officer, datetime.now(UTC) + timedelta(days=1))
        wait_for(lambda: stage.beats[-1]["approvals"])
        (told,) = stage.beats[-1]["approvals"]
        assert (told["run"], told["offer"]) == ("run-1", ours.digest)
        wait_for(lambda: not status(home)["waiting"])
        revoke_approval(SiteHome.open(home.path), "run-1")
        wait_for(lambda: stage.beats[-1]["withdrawn"])
        assert stage.beats[-1]["approvals"] == []
        stage.offers = [later.model_dump()]
        wait_for(lambda: (home.path / "offers" / f"{later.digest}.json").exists())
        stage.offers = []
        wait_for(lambda: len(list((home.path / "offers").iterdir())) == 1)  # what was approved once stays
    assert status(home)["state"] == "stopped"


def test_it_comes_back_after_the_coordinator_was_away_and_keeps_one_child(home, stage, tmp_path):
    with running(home) as (agent, lines):
        with served(stage.app, tmp_path, stage.port):
            wait_for(lambda: status(home).get("state") == "connected")
            process, env = child(home)
        wait_for(lambda: status(home)["state"] == "disconnected")
        assert status(home)["problem"]
        beats = len(stage.beats)
        with served(stage.app, tmp_path, stage.port):
            wait_for(lambda: len(stage.beats) > beats)
            wait_for(lambda: status(home)["state"] == "connected")
            assert status(home)["problem"] == ""
        assert runs(process)
        assert env["OMP_NUM_THREADS"] == env["HEMOFED_CORES"] == "1"
        assert sum("connected to stage" in line for line in lines) == 2
        assert agent.status.flare == "running"
    assert not runs(process)


def test_a_child_that_dies_is_started_again(home, online):
    with running(home) as (_, lines):
        first, _ = child(home)
        (home.path / "child").unlink()
        first.kill()
        second, _ = child(home)
        assert second.pid != first.pid
        assert any("ended with code -9" in line for line in lines)
    assert not runs(second)


def test_a_site_that_was_shut_out_stops_its_child_and_says_so(home, stage, online):
    with running(home):
        process, _ = child(home)
        stage.credential = "another"
        wait_for(lambda: status(home)["state"] == "denied")
        wait_for(lambda: not runs(process))
        assert "who are you" in status(home)["problem"]
        assert "the-credential" not in (home.path / "log" / "agent.jsonl").read_text() + json.dumps(status(home))


def test_models_of_finished_runs_arrive_once(home, stage, online):
    model = save({"weights": torch.ones(10)})
    stage.models = {("done", "global"): model, ("done", "bad"): b"nonsense", ("done", "own"): model}
    stage.runs = [
        {"id": "done", "state": "finished", "models": ["global", "bad", "own"]},
        {"id": "going", "state": "running", "models": ["global"]},
    ]
    with running(home) as (_, lines):
        wait_for(lambda: status(home).get("models") == ["done/global"])
        wait_for(lambda: any("thrown away" in line for line in lines))
        beats = len(stage.beats)
        wait_for(lambda: len(stage.beats) > beats + 3)
        assert status(home)["run"] == "going"
    assert sorted(stage.fetched) == [("done", "bad"), ("done", "global")]
    assert (home.path / "models" / "done" / "global.safetensors").read_bytes() == model
    assert len(list((home.path / "models").rglob("*.*"))) == 1


def test_clock_version_and_disk_are_warned_of(home, stage, online):
    SiteSettings(limits=ResourceLimits(min_free_disk_gb=1e9)).save(home.path)
    stage.ahead = timedelta(minutes=9)
    stage.offers = [an_offer(home, stage, version="9.9").model_dump(), {"run": "future", "version": "10.0"}]
    with running(home):
        wait_for(lambda: len(status(home).get("warnings", [])) == 4)
        text = "\n".join(status(home)["warnings"])
        for words in ("9 minutes apart", "needs hemofed 9.9", "install hemofed==10.0", "must stay free"):
            assert words in text
        assert status(home)["flare"] == "off"
        assert not (home.path / "child").exists()
        wait_for(lambda: stage.beats[-1]["status"]["warnings"] == 4)
    assert str(home.path) not in json.dumps(stage.beats)  # no path of the site leaves it


def test_one_agent_a_home_and_once(home, stage, online):
    with running(home):
        wait_for(lambda: status(home).get("state") == "connected")
        with pytest.raises(RunFolderError, match="already"):
            SiteAgent(home.path).run(threading.Event())
    beats = len(stage.beats)
    SiteAgent(home.path).run(threading.Event(), once=True)
    assert len(stage.beats) == beats + 1
    stage.fail = [500]
    with pytest.raises(ServiceError, match="500"):
        SiteAgent(home.path).run(threading.Event(), once=True)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_child_survives_however_the_agent_ends(home, online, tmp_path, how):
    (tmp_path / "child_module.py").write_text(CHILD)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(home.path)], env=env)
    try:
        process, _ = child(home)
        agent.send_signal(how)
        assert agent.wait(20) == (0 if how == signal.SIGTERM else -9)
        wait_for(lambda: not runs(process))
    finally:
        agent.kill()
        agent.wait()
