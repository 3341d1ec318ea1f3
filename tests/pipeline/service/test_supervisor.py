"""The run supervisor, with a fake of FLARE's server that loses its jobs as the real one does."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.core.errors import ServiceError
from pipeline.ops.json_log import open_log
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.records.live_status import LiveStatusWriter
from pipeline.records.run_control import request_state, requested_state
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
def supervised_run(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "JOIN_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "MAX_RETRY_SECONDS", 0.0)
    store = CoordinatorStore(f"sqlite:///{tmp_path / 'x.db'}")
    for site, key in KEYS.items():
        token, _ = store.accounts.create_invitation(site, 1, "lead")
        store.accounts.enrol_site(token, EnrolmentRequest(site, key, "0" * 64, "0.1.0"))
    store.add_run("r", name="r", strategy="fedavg", rounds=3, digest=DIGEST, min_sites=2, sites=KEYS, actor="lead")
    (tmp_path / "runs" / "r").mkdir(parents=True)
    job_runner = FakeJobRunner()
    yield RunSupervisor(tmp_path / "runs", store, job_runner, open_log(tmp_path / "log.jsonl")), store, job_runner
    store.close()


def approve(store, *sites):
    now = datetime.now(UTC)
    for site in sites:
        assert store.record_approval("r", site, DIGEST, now, now + timedelta(days=1), "fp")


def write_outcome(supervisor, outcome, reason=""):
    AttemptOutcome(outcome=outcome, reason=reason).write(supervisor.runs_folder / "r")


def run_state(store):
    run = store.find_run("r")
    return run.state, run.reason


def start_run(supervised_run):
    supervisor, store, job_runner = supervised_run
    approve(store, *KEYS)
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "running"
    return supervisor, store, job_runner


def test_run_starts_only_after_all_approvals(supervised_run):
    supervisor, store, job_runner = supervised_run
    approve(store, "a", "b")
    for _ in range(3):
        supervisor.poll_runs()
    assert run_state(store)[0] == "offered"
    assert job_runner.submitted == []
    approve(store, "c")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "running"
    assert job_runner.submitted == [["a", "b", "c"]]


def test_run_waits_for_min_sites_and_names_the_missing(supervised_run):
    supervisor, store, job_runner = supervised_run
    job_runner.connected = {"b"}
    approve(store, *KEYS)
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "waiting"
    assert "a is not connected" in run_state(store)[1]
    job_runner.connected = {"a", "b"}
    supervisor.poll_runs()
    assert job_runner.submitted == [["a", "b"]]


@pytest.mark.parametrize(
    ("outcome", "reason", "state"),
    [
        ("finished", "", "finished"),
        ("failed", "x", "failed"),
        ("halted", "pause", "paused"),
        ("halted", "stop", "stopped"),
    ],
)
def test_outcome_of_an_attempt_decides_the_state(supervised_run, outcome, reason, state):
    supervisor, store, job_runner = start_run(supervised_run)
    write_outcome(supervisor, outcome, reason)
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == state
    assert len(job_runner.submitted) == 1


def test_lost_attempt_is_retried(supervised_run):
    supervisor, store, job_runner = start_run(supervised_run)
    job_runner.dead_jobs.add("job-1")
    supervisor.poll_runs()
    assert run_state(store)[0] == "waiting"
    assert "continues from round" in run_state(store)[1]
    supervisor.poll_runs()
    assert run_state(store)[0] == "running"
    assert len(job_runner.submitted) == 2


def test_attempts_are_restarted_after_the_flare_server_died(supervised_run):
    supervisor, _, job_runner = start_run(supervised_run)
    supervisor.on_server_died()
    job_runner.is_down = True
    with pytest.raises(ServiceError):
        supervisor.poll_runs()
    job_runner.is_down = False
    supervisor.poll_runs()
    assert len(job_runner.submitted) == 2


def test_run_fails_after_too_many_attempts_without_progress(supervised_run):
    supervisor, store, job_runner = start_run(supervised_run)
    for _ in range(2 * MAX_FAILED_ATTEMPTS + 2):
        job_runner.dead_jobs.add(f"job-{len(job_runner.submitted)}")
        supervisor.poll_runs()
    assert run_state(store)[0] == "failed"
    assert len(job_runner.submitted) == MAX_FAILED_ATTEMPTS


def test_returned_site_joins_the_next_attempt(supervised_run):
    supervisor, _, job_runner = start_run(supervised_run)
    LiveStatusWriter(supervisor.runs_folder / "r", rounds=4, unreachable=["c"]).write()
    supervisor.poll_runs()
    assert requested_state(supervisor.runs_folder / "r") == "regroup"
    write_outcome(supervisor, "halted", "regroup")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert len(job_runner.submitted) == 2
    assert requested_state(supervisor.runs_folder / "r") == "run"


def test_pause_request_survives_a_lost_attempt(supervised_run):
    supervisor, store, job_runner = start_run(supervised_run)
    store.apply_action("r", "pause", "lead", lambda run: request_state(supervisor.runs_folder / "r", "pause"))
    job_runner.dead_jobs.add("job-1")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert run_state(store)[0] == "paused"
    assert len(job_runner.submitted) == 1


def test_pause_request_during_the_start_of_an_attempt_is_restored(supervised_run):
    supervisor, store, _ = start_run(supervised_run)
    store.apply_action("r", "pause", "lead")  # its control.json was overwritten
    assert requested_state(supervisor.runs_folder / "r") == "run"
    supervisor.poll_runs()
    assert requested_state(supervisor.runs_folder / "r") == "pause"


def test_site_with_revoked_approval_is_not_in_the_next_attempt(supervised_run):
    supervisor, store, job_runner = start_run(supervised_run)
    store.record_revocation("r", "c", datetime.now(UTC) + timedelta(seconds=1))
    job_runner.dead_jobs.add("job-1")
    supervisor.poll_runs()
    supervisor.poll_runs()
    assert job_runner.submitted[-1] == ["a", "b"]
