"""Runs come to where their lead wants them; what FLARE does is response by a stand-in that forgets as the real one does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.coordinator.live_status import request_state, requested_state
from pipeline.core.errors import ServiceError
from pipeline.ops.json_log import open_log
from pipeline.service.runtime import supervisor as supervisor_module
from pipeline.service.runtime.supervisor import MAX_FAILED_ATTEMPTS, RunSupervisor
from pipeline.service.storage.accounts import EnrolmentRequest
from pipeline.service.storage.store import CoordinatorStore

DIGEST = "d" * 64
KEYS = {"a": "1" * 64, "b": "2" * 64, "c": "3" * 64}


@dataclass
class FakeJobRunner:
    connected: set[str] = field(default_factory=lambda: set(KEYS))
    submitted: list[list[str]] = field(default_factory=list)
    dead_jobs: set[str] = field(default_factory=set)
    is_down: bool = False

    def connected_sites(self) -> set[str]:
        if self.is_down:
            raise ServiceError("FLARE's server cannot be asked")
        return self.connected

    def submit_job(self, run: str, digest: str, sites: list[str], min_sites: int) -> str:
        self.submitted.append(sites)
        return f"job-{len(self.submitted)}"

    def has_ended(self, job_id: str) -> bool:
        return job_id in self.dead_jobs

    def abort_job(self, job_id: str) -> None:
        self.dead_jobs.add(job_id)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "JOIN_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "MAX_RETRY_SECONDS", 0.0)
    store = CoordinatorStore(f"sqlite:///{tmp_path / 'x.db'}")
    for site, key in KEYS.items():
        token, _ = store.accounts.create_invitation(site, 1, "lead")
        store.accounts.enrol_site(token, EnrolmentRequest(site, key, "0" * 64, "0.1.0"))
    store.add_run("r", name="r", strategy="fedavg", rounds=3, digest=DIGEST, min_sites=2, sites=KEYS, actor="lead")
    (tmp_path / "runs" / "r").mkdir(parents=True)
    server = FakeJobRunner()
    yield RunSupervisor(tmp_path / "runs", store, server, open_log(tmp_path / "log.jsonl")), store, server
    store.close()


def approve(store, *sites):
    now = datetime.now(UTC)
    for site in sites:
        assert store.record_approval("r", site, DIGEST, now, now + timedelta(days=1), "fp")


def write_outcome(supervisor, how, why=""):
    (supervisor.runs_folder / "r" / "ended.json").write_text(json.dumps({"how": how, "why": why}))


def run_state(store):
    run = store.find_run("r")
    return run.state, run.reason


def start_run(parts):
    supervisor, store, server = parts
    approve(store, *KEYS)
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "running"
    return supervisor, store, server


def test_nothing_runs_before_all_have_approved(parts):
    supervisor, store, server = parts
    approve(store, "a", "b")
    for _ in range(3):
        supervisor.poll_runs()
    assert run_state(store)[0] == "offered"
    assert server.submitted == []
    approve(store, "c")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "running"
    assert server.submitted == [["a", "b", "c"]]


def test_it_waits_for_enough_sites_and_says_for_whom(parts):
    supervisor, store, server = parts
    server.connected = {"b"}
    approve(store, *KEYS)
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "waiting"
    assert "a is not connected" in run_state(store)[1]
    server.connected = {"a", "b"}
    supervisor.poll_runs()
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
def test_how_an_attempt_ends_decides_where_the_run_rests(parts, how, why, then):
    supervisor, store, server = start_run(parts)
    write_outcome(supervisor, how, why)
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == then
    assert len(server.submitted) == 1


def test_an_attempt_that_is_lost_is_followed_by_another(parts):
    supervisor, store, server = start_run(parts)
    server.dead_jobs.add("job-1")
    supervisor.poll_runs()
    assert run_state(store)[0] == "waiting"
    assert "goes on from round" in run_state(store)[1]
    supervisor.poll_runs()
    assert run_state(store)[0] == "running"
    assert len(server.submitted) == 2


def test_a_server_that_died_takes_all_attempts_with_it(parts):
    supervisor, _, server = start_run(parts)
    supervisor.on_server_died()
    server.is_down = True
    with pytest.raises(ServiceError):
        supervisor.poll_runs()
    server.is_down = False
    supervisor.poll_runs()
    assert len(server.submitted) == 2


def test_attempts_that_lead_nowhere_end_some_time(parts):
    supervisor, store, server = start_run(parts)
    for _ in range(2 * MAX_FAILED_ATTEMPTS + 2):
        server.dead_jobs.add(f"job-{len(server.submitted)}")
        supervisor.poll_runs()
    assert run_state(store)[0] == "failed"
    assert len(server.submitted) == MAX_FAILED_ATTEMPTS


def test_a_site_that_came_back_is_taken_in(parts):
    supervisor, _, server = start_run(parts)
    (supervisor.runs_folder / "r" / "live.json").write_text(json.dumps({"lost": ["c"]}))
    supervisor.poll_runs()
    assert requested_state(supervisor.runs_folder / "r") == "regroup"
    write_outcome(supervisor, "halted", "regroup")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert len(server.submitted) == 2
    assert requested_state(supervisor.runs_folder / "r") == "run"


def test_what_the_lead_asks_meanwhile_is_not_overridden(parts):
    supervisor, store, server = start_run(parts)
    store.apply_action("r", "pause", "lead", lambda run: request_state(supervisor.runs_folder / "r", "pause"))
    server.dead_jobs.add("job-1")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "paused"
    assert len(server.submitted) == 1


def test_a_pause_that_came_while_the_attempt_was_made_is_heard(parts):
    supervisor, store, _ = start_run(parts)
    store.apply_action("r", "pause", "lead")  # and its control.json was overwritten
    assert requested_state(supervisor.runs_folder / "r") == "run"
    supervisor.poll_runs()
    assert requested_state(supervisor.runs_folder / "r") == "pause"


def test_a_withdrawn_approval_keeps_a_site_out_of_the_next_attempt(parts):
    supervisor, store, server = start_run(parts)
    store.record_withdrawal("r", "c", datetime.now(UTC) + timedelta(seconds=1))
    server.dead_jobs.add("job-1")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert server.submitted[-1] == ["a", "b"]
