"""Brings every run to the state that its lead requested, although processes and connections may fail.

FLARE does not persist jobs: a killed server loses them, and a site that reconnects is not in the job that it left.
Therefore a FLARE job is only one attempt at a run. The run's progress is in its folder; if an attempt ends early, the
next one continues from the last checkpoint with all sites that are connected by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pipeline.core.errors import HemofedError
from pipeline.ops.json_log import JsonLog
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.records.live_status import LiveStatus
from pipeline.records.run_control import DesiredState, request_state, requested_state
from pipeline.service.runtime.run_states import TERMINAL_STATES
from pipeline.service.storage.database import RunRow
from pipeline.service.storage.store import CoordinatorStore

POLL_SECONDS = 1.0
JOIN_GRACE_SECONDS = 10.0  # how long a run waits for its remaining sites once `min_sites` are connected
DESIRED_BY_STATE: Mapping[str, DesiredState] = {"pausing": "pause", "stopping": "stop"}
MAX_RETRY_SECONDS = 60.0  # between two attempts
MAX_FAILED_ATTEMPTS = 8  # consecutive attempts without a new round; then the run fails and a person has to look at it


class JobRunner(Protocol):
    """What the supervisor needs from FLARE's server."""

    def connected_sites(self) -> set[str]: ...
    def submit_job(self, run: str, digest: str, sites: list[str], min_sites: int) -> str: ...
    def has_ended(self, job_id: str) -> bool: ...
    def abort_job(self, job_id: str) -> None: ...


@dataclass
class RunAttempt:
    """One FLARE job of a run."""

    job_id: str
    sites: list[str]
    start_round: int  # of the checkpoint that it began from; -1 without one
    started_at: float = field(default_factory=time.monotonic)


@dataclass
class RunSupervisor:
    """Starts, follows and retries attempts. `quorum_since` and `retry_after` are times of `time.monotonic`, by run."""

    runs_folder: Path
    store: CoordinatorStore
    job_runner: JobRunner
    log: JsonLog
    attempts: dict[str, RunAttempt] = field(default_factory=dict)
    failed_attempts: dict[str, int] = field(default_factory=dict)  # by run: consecutive attempts without a new round
    quorum_since: dict[str, float] = field(default_factory=dict)
    retry_after: dict[str, float] = field(default_factory=dict)
    registered_sites: set[str] | None = None  # with FLARE's server at the last poll; None if it did not answer

    def poll_until_stopped(self, stop_event: threading.Event) -> None:
        while not stop_event.wait(POLL_SECONDS):
            try:
                self.poll_runs()
            except HemofedError as error:  # for example while FLARE's server restarts
                self.log.write_event("supervisor", "warning", why=str(error))
            except Exception as error:
                self.log.write_event("supervisor failed", "error", why=repr(error))

    def on_server_died(self) -> None:
        """Forgets all attempts: a new FLARE server does not know their jobs."""
        self.attempts.clear()

    def poll_runs(self) -> None:
        self.registered_sites = None
        self.registered_sites = self.job_runner.connected_sites()
        for run in self.store.list_runs():
            if run.state in TERMINAL_STATES or run.state == "paused":
                continue
            if run.id in self.attempts:
                self._follow_attempt(run, self.attempts[run.id])
            elif run.state in ("pausing", "stopping"):
                self._settle_run(run, "paused" if run.state == "pausing" else "stopped")
            elif run.state == "offered":
                if self.store.approved_sites(run.id) >= set(run.sites):
                    self.store.set_run_state(run.id, "starting", "all sites have approved", expected_states=["offered"])
            elif time.monotonic() >= self.retry_after.get(run.id, 0.0):
                self._start_attempt(run)

    def _start_attempt(self, run: RunRow) -> None:
        approved_sites = self.store.approved_sites(run.id)
        ready_sites = [site for site in run.sites if site in approved_sites & (self.registered_sites or set())]
        if len(ready_sites) < run.min_sites:
            self.quorum_since.pop(run.id, None)
            missing = [_describe_missing_site(site, approved_sites) for site in run.sites if site not in ready_sites]
            reason = f"{len(ready_sites)} of at least {run.min_sites} sites are ready; {', '.join(missing)}"
            self._set_run_state(run, "waiting", reason)
            return
        ready_since = self.quorum_since.setdefault(run.id, time.monotonic())
        if len(ready_sites) < len(run.sites) and time.monotonic() - ready_since < JOIN_GRACE_SECONDS:
            return
        self.quorum_since.pop(run.id, None)
        folder = self.runs_folder / run.id
        for record_type in (AttemptOutcome, LiveStatus):  # of the previous attempt
            (folder / record_type.FILE_NAME).unlink(missing_ok=True)
        request_state(folder, "run")
        job_id = self.job_runner.submit_job(run.id, run.digest, ready_sites, run.min_sites)
        self.attempts[run.id] = RunAttempt(job_id, ready_sites, self._checkpoint_round(run))
        self.log.write_event("attempt started", run=run.id, job=job_id, sites=ready_sites)
        self._set_run_state(run, "running", "")

    def _follow_attempt(self, run: RunRow, attempt: RunAttempt) -> None:
        folder = self.runs_folder / run.id
        ended = AttemptOutcome.read_if_valid(folder)
        if ended is None and not self.job_runner.has_ended(attempt.job_id):
            desired_state = DESIRED_BY_STATE.get(run.state)
            if desired_state is not None and requested_state(folder) != desired_state:
                request_state(folder, desired_state)  # starting the attempt overwrote the lead's request
            self._regroup_returned_sites(run, attempt)
            return
        del self.attempts[run.id]
        outcome, reason = (ended.outcome, ended.reason) if ended else ("lost", "the run's process ended")
        self.log.write_event("attempt ended", run=run.id, job=attempt.job_id, how=outcome, why=reason)
        self.job_runner.abort_job(attempt.job_id)  # in case some of its processes still run
        if outcome == "finished":
            self._settle_run(run, "finished")
        elif outcome == "failed":
            self._settle_run(run, "failed", reason)
        elif outcome == "halted" and reason in ("pause", "stop"):
            self._settle_run(run, "paused" if reason == "pause" else "stopped")
        else:
            self._schedule_retry(run, attempt, reason)

    def _schedule_retry(self, run: RunRow, attempt: RunAttempt, reason: str) -> None:
        """Schedules another attempt; fails the run after `MAX_FAILED_ATTEMPTS` in a row without a new round."""
        is_stuck = self._checkpoint_round(run) <= attempt.start_round and reason != "regroup"
        self.failed_attempts[run.id] = self.failed_attempts.get(run.id, 0) + 1 if is_stuck else 0
        if self.failed_attempts[run.id] >= MAX_FAILED_ATTEMPTS:
            text = f"{MAX_FAILED_ATTEMPTS} attempts in a row completed no round; the last one: {reason}"
            self._settle_run(run, "failed", text)
            return
        delay = min(MAX_RETRY_SECONDS, 2.0 ** self.failed_attempts[run.id]) if is_stuck else 0.0
        self.retry_after[run.id] = time.monotonic() + delay
        if run.state not in ("pausing", "stopping"):
            text = "" if reason == "regroup" else f"{reason}; it continues from round {self._checkpoint_round(run)}"
            self._set_run_state(run, "waiting", text)

    def _regroup_returned_sites(self, run: RunRow, attempt: RunAttempt) -> None:
        """Ends the attempt after its round if absent sites have connected, so that the next attempt includes them."""
        if run.state != "running" or time.monotonic() - attempt.started_at < JOIN_GRACE_SECONDS:
            return
        live = LiveStatus.read_if_valid(self.runs_folder / run.id)
        absent_sites = {site for site in run.sites if site not in attempt.sites} | {*(live.unreachable if live else ())}
        returned_sites = absent_sites & (self.registered_sites or set()) & self.store.approved_sites(run.id)
        if returned_sites:
            self.log.write_event("regrouping", run=run.id, sites=sorted(returned_sites))
            attempt.started_at = time.monotonic()
            request_state(self.runs_folder / run.id, "regroup")

    def _settle_run(self, run: RunRow, state: str, reason: str = "") -> None:
        """Enters a state in which nothing is attempted."""
        self.failed_attempts.pop(run.id, None)
        self.retry_after.pop(run.id, None)
        self.store.set_run_state(run.id, state, reason)  # type: ignore[arg-type]

    def _set_run_state(self, run: RunRow, state: str, reason: str) -> None:
        """Does not overwrite what a lead requested since the poll began."""
        if (run.state, run.reason) != (state, reason):
            self.store.set_run_state(run.id, state, reason, expected_states=["starting", "waiting", "running"])  # type: ignore[arg-type]

    def _checkpoint_round(self, run: RunRow) -> int:
        """-1 without a checkpoint."""
        rounds = sorted((self.runs_folder / run.id / "checkpoint").glob("round-*.safetensors"))
        return int(rounds[-1].stem.partition("-")[2]) if rounds else -1


def _describe_missing_site(site: str, approved_sites: set[str]) -> str:
    return f"{site} {'is not connected' if site in approved_sites else 'has not approved'}"
