"""Runs come to where their lead wants them; what FLARE does is told by a stand-in that forgets as the real one does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.coordinator.live_status import request_state, requested_state
from pipeline.core.errors import ServiceError
from pipeline.ops.json_log import open_log
from pipeline.service.runtime import supervisor as module
from pipeline.service.runtime.supervisor import MAX_FAILED_ATTEMPTS, RunSupervisor
from pipeline.service.storage.accounts import EnrolmentRequest
from pipeline.service.storage.store import CoordinatorStore

DIGEST = "d" * 64
KEYS = {"a": "1" * 64, "b": "2" * 64, "c": "3" * 64}


@dataclass
class Server:
    there: set[str] = field(default_factory=lambda: set(KEYS))
    submitted: list[list[str]] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    away: bool = False

    def connected(self) -> set[str]:
        if self.away:
            raise ServiceError("FLARE's server cannot be asked")
        return self.there

    def submit(self, run: str, digest: str, sites: list[str], fewest: int) -> str:
        self.submitted.append(sites)
        return f"job-{len(self.submitted)}"

    def over(self, job: str) -> bool:
        return job in self.dead

    def abort(self, job: str) -> None:
        self.dead.add(job)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(module, "SLOWEST", 0.0)
    store = CoordinatorStore(f"sqlite:///{tmp_path / 'x.db'}")
    for site, key in KEYS.items():
        token, _ = store.accounts.create_invitation(site, 1, "lead")
        store.accounts.enrol_site(token, EnrolmentRequest(site, key, "0" * 64, "0.1.0"))
    store.add_run("r", name="r", strategy="fedavg", rounds=3, digest=DIGEST, min_sites=2, sites=KEYS, actor="lead")
    (tmp_path / "runs" / "r").mkdir(parents=True)
    server = Server()
    yield RunSupervisor(tmp_path / "runs", store, server, open_log(tmp_path / "log.jsonl")), store, server
    store.close()


def approve(store, *sites):
    now = datetime.now(UTC)
    for site in sites:
        assert store.approve("r", site, DIGEST, now, now + timedelta(days=1), "fp")


def end(boss, how, why=""):
    (boss.runs / "r" / "ended.json").write_text(json.dumps({"how": how, "why": why}))


def state(store):
    run = store.run("r")
    return run.state, run.reason


def begun(scene):
    boss, store, server = scene
    approve(store, *KEYS)
    boss.look()
    boss.look()
    assert state(store)[0] == "running"
    return boss, store, server


def test_nothing_runs_before_all_have_approved(scene):
    boss, store, server = scene
    approve(store, "a", "b")
    for _ in range(3):
        boss.look()
    assert state(store)[0] == "offered"
    assert server.submitted == []
    approve(store, "c")
    boss.look()
    boss.look()
    assert state(store)[0] == "running"
    assert server.submitted == [["a", "b", "c"]]


def test_it_waits_for_enough_sites_and_says_for_whom(scene):
    boss, store, server = scene
    server.there = {"b"}
    approve(store, *KEYS)
    boss.look()
    boss.look()
    assert state(store)[0] == "waiting"
    assert "a is not connected" in state(store)[1]
    server.there = {"a", "b"}
    boss.look()
    assert server.submitted == [["a", "b"]]


@pytest.mark.parametrize(
    ("how", "why", "then"),
    [
        ("finished", "", "finished"),
        ("failed", "x", "failed"),
        ("halted", "pause", "paused"),
        ("halted", "stop", "stopped"),
    ],
)
def test_how_an_attempt_ends_decides_where_the_run_rests(scene, how, why, then):
    boss, store, server = begun(scene)
    end(boss, how, why)
    boss.look()
    boss.look()
    assert state(store)[0] == then
    assert len(server.submitted) == 1


def test_an_attempt_that_is_lost_is_followed_by_another(scene):
    boss, store, server = begun(scene)
    server.dead.add("job-1")
    boss.look()
    assert state(store)[0] == "waiting"
    assert "goes on from round" in state(store)[1]
    boss.look()
    assert state(store)[0] == "running"
    assert len(server.submitted) == 2


def test_a_server_that_died_takes_all_attempts_with_it(scene):
    boss, _, server = begun(scene)
    boss.on_server_died()
    server.away = True
    with pytest.raises(ServiceError):
        boss.look()
    server.away = False
    boss.look()
    assert len(server.submitted) == 2


def test_attempts_that_lead_nowhere_end_some_time(scene):
    boss, store, server = begun(scene)
    for _ in range(2 * MAX_FAILED_ATTEMPTS + 2):
        server.dead.add(f"job-{len(server.submitted)}")
        boss.look()
    assert state(store)[0] == "failed"
    assert len(server.submitted) == MAX_FAILED_ATTEMPTS


def test_a_site_that_came_back_is_taken_in(scene):
    boss, _, server = begun(scene)
    (boss.runs / "r" / "live.json").write_text(json.dumps({"lost": ["c"]}))
    boss.look()
    assert requested_state(boss.runs / "r") == "regroup"
    end(boss, "halted", "regroup")
    boss.look()
    boss.look()
    assert len(server.submitted) == 2
    assert requested_state(boss.runs / "r") == "run"


def test_what_the_lead_asks_meanwhile_is_not_overridden(scene):
    boss, store, server = begun(scene)
    store.apply_action("r", "pause", "lead", lambda run: request_state(boss.runs / "r", "pause"))
    server.dead.add("job-1")
    boss.look()
    boss.look()
    assert state(store)[0] == "paused"
    assert len(server.submitted) == 1


def test_a_pause_that_came_while_the_attempt_was_made_is_heard(scene):
    boss, store, _ = begun(scene)
    store.apply_action("r", "pause", "lead")  # and its control.json was overwritten
    assert requested_state(boss.runs / "r") == "run"
    boss.look()
    assert requested_state(boss.runs / "r") == "pause"


def test_a_withdrawn_approval_keeps_a_site_out_of_the_next_attempt(scene):
    boss, store, server = begun(scene)
    store.record_withdrawal("r", "c", datetime.now(UTC) + timedelta(seconds=1))
    server.dead.add("job-1")
    boss.look()
    boss.look()
    assert server.submitted[-1] == ["a", "b"]
