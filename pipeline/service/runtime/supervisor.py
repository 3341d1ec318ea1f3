"""Brings every run to where its lead wants it, and keeps it there, whatever dies meanwhile.

FLARE forgets: a killed server loses its jobs, and a site that comes back stays outside the job that it left. So a job is
nothing here but an attempt at a run. What has happened is in the run's folder; when an attempt ends too early, the next
one goes on from the last checkpoint, with all sites that are there by then.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pipeline.coordinator.live_status import DesiredState, read_live_status, request_state, requested_state
from pipeline.core.errors import HemofedError
from pipeline.ops.json_log import JsonLog
from pipeline.service.runtime.run_states import TERMINAL_STATES
from pipeline.service.storage.database import RunRow
from pipeline.service.storage.store import CoordinatorStore

POLL_SECONDS = 1.0  # seconds between two looks
JOIN_GRACE_SECONDS = 10.0  # seconds that a run waits for the last sites once enough are there
DESIRED_BY_STATE: Mapping[str, DesiredState] = {"pausing": "pause", "stopping": "stop"}
MAX_RETRY_SECONDS = 60.0  # seconds between two attempts
MAX_FAILED_ATTEMPTS = 8  # attempts in a row that ended without a new round: then a person has to look


class JobRunner(Protocol):
    """What the supervisor needs of FLARE's server."""

    def connected_sites(self) -> set[str]: ...
    def submit_job(self, run: str, digest: str, sites: list[str], min_sites: int) -> str: ...
    def has_ended(self, job_id: str) -> bool: ...
    def abort_job(self, job_id: str) -> None: ...


@dataclass
class RunAttempt:
    job_id: str
    sites: list[str]
    start_round: int  # at which it began
    started_at: float = field(default_factory=time.monotonic)


@dataclass
class RunSupervisor:
    runs_folder: Path
    store: CoordinatorStore
    job_runner: JobRunner
    log: JsonLog
    attempts: dict[str, RunAttempt] = field(default_factory=dict)
    failed_attempts: dict[str, int] = field(default_factory=dict)
    quorum_since: dict[str, float] = field(default_factory=dict)
    retry_after: dict[str, float] = field(default_factory=dict)
    registered_sites: set[str] | None = None  # with FLARE's server, at the last look; None: it did not say

    def poll_until_stopped(self, stop_event: threading.Event) -> None:
        while not stop_event.wait(POLL_SECONDS):
            try:
                self.poll_runs()
            except HemofedError as error:  # such as a server that is just being started again
                self.log.write_event("supervisor", "warning", why=str(error))
            except Exception as error:
                self.log.write_event("supervisor failed", "error", why=repr(error))

    def on_server_died(self) -> None:
        """All jobs are gone with it."""
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
            missing = ", ".join(
                self._missing_reason(site, approved_sites) for site in run.sites if site not in ready_sites
            )
            self._set_run_state(
                run, "waiting", f"{len(ready_sites)} of at least {run.min_sites} sites are ready; {missing}"
            )
            return
        ready_since = self.quorum_since.setdefault(run.id, time.monotonic())
        if len(ready_sites) < len(run.sites) and time.monotonic() - ready_since < JOIN_GRACE_SECONDS:
            return
        self.quorum_since.pop(run.id, None)
        folder = self.runs_folder / run.id
        for name in ("ended.json", "live.json"):  # of the attempt before
            (folder / name).unlink(missing_ok=True)
        request_state(folder, "run")
        job_id = self.job_runner.submit_job(run.id, run.digest, ready_sites, run.min_sites)
        self.attempts[run.id] = RunAttempt(job_id, ready_sites, self._checkpoint_round(run))
        self.log.write_event("attempt", run=run.id, job=job_id, sites=ready_sites)
        self._set_run_state(run, "running", "")

    def _missing_reason(self, site: str, approved_sites: set[str]) -> str:
        return f"{site} {'is not connected' if site in approved_sites else 'has not approved'}"

    def _follow_attempt(self, run: RunRow, attempt: RunAttempt) -> None:
        run_outcome = _read_outcome(self.runs_folder / run.id)
        if run_outcome is None and not self.job_runner.has_ended(attempt.job_id):
            if (
                run.state in DESIRED_BY_STATE
                and requested_state(self.runs_folder / run.id) != DESIRED_BY_STATE[run.state]
            ):
                request_state(
                    self.runs_folder / run.id, DESIRED_BY_STATE[run.state]
                )  # the lead spoke while the attempt was being made
            self._regroup_returned_sites(run, attempt)
            return
        del self.attempts[run.id]
        outcome, reason = run_outcome or ("lost", "the run's process ended")
        self.log.write_event("attempt over", run=run.id, job=attempt.job_id, how=outcome, why=reason)
        self.job_runner.abort_job(attempt.job_id)  # whatever of it is left
        if outcome == "finished":
            self._settle_run(run, "finished")
        elif outcome == "failed":
            self._settle_run(run, "failed", reason)
        elif outcome == "halted" and reason in ("pause", "stop"):
            self._settle_run(run, "paused" if reason == "pause" else "stopped")
        else:
            self._schedule_retry(run, attempt, reason)

    def _schedule_retry(self, run: RunRow, attempt: RunAttempt, reason: str) -> None:
        """From the last checkpoint; not for ever if that leads nowhere."""
        is_stuck = self._checkpoint_round(run) <= attempt.start_round and reason != "regroup"
        self.failed_attempts[run.id] = self.failed_attempts.get(run.id, 0) + 1 if is_stuck else 0
        if self.failed_attempts[run.id] >= MAX_FAILED_ATTEMPTS:
            self._settle_run(
                run, "failed", f"{MAX_FAILED_ATTEMPTS} attempts in a row came to nothing; the last one: {reason}"
            )
            return
        self.retry_after[run.id] = time.monotonic() + (
            min(MAX_RETRY_SECONDS, 2.0 ** self.failed_attempts[run.id]) if is_stuck else 0.0
        )
        if run.state not in ("pausing", "stopping"):
            self._set_run_state(
                run,
                "waiting",
                "" if reason == "regroup" else f"{reason}; it goes on from round {self._checkpoint_round(run)}",
            )

    def _regroup_returned_sites(self, run: RunRow, attempt: RunAttempt) -> None:
        """Sites that came, or came back, since the attempt began are in the next one."""
        if run.state != "running" or time.monotonic() - attempt.started_at < JOIN_GRACE_SECONDS:
            return
        live = read_live_status(self.runs_folder / run.id) or {}
        absent_sites = {site for site in run.sites if site not in attempt.sites} | set(live.get("lost", []))
        returned_sites = absent_sites & (self.registered_sites or set()) & self.store.approved_sites(run.id)
        if returned_sites:
            self.log.write_event("taking in", run=run.id, sites=sorted(returned_sites))
            attempt.started_at = time.monotonic()
            request_state(self.runs_folder / run.id, "regroup")

    def _settle_run(self, run: RunRow, state: str, reason: str = "") -> None:
        self.failed_attempts.pop(run.id, None)
        self.retry_after.pop(run.id, None)
        self.store.set_run_state(run.id, state, reason)  # type: ignore[arg-type]

    def _set_run_state(self, run: RunRow, state: str, reason: str) -> None:
        if (run.state, run.reason) != (state, reason):
            self.store.set_run_state(run.id, state, reason, expected_states=["starting", "waiting", "running"])  # type: ignore[arg-type]

    def _checkpoint_round(self, run: RunRow) -> int:
        rounds = sorted((self.runs_folder / run.id / "checkpoint").glob("round-*.safetensors"))
        return int(rounds[-1].stem.partition("-")[2]) if rounds else -1


def _read_outcome(folder: Path) -> tuple[str, str] | None:
    try:
        record = json.loads((folder / "ended.json").read_text("utf-8"))
        return str(record["how"]), str(record["why"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
