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

from pipeline.coordinator.live_status import Want, read_live, want, wanted
from pipeline.core.errors import HemofedError
from pipeline.ops.json_log import Log
from pipeline.service.runtime.run_states import OVER
from pipeline.service.storage.database import Run
from pipeline.service.storage.store import Store

EVERY = 1.0  # seconds between two looks
PATIENCE = 10.0  # seconds that a run waits for the last sites once enough are there
ASKED: Mapping[str, Want] = {"pausing": "pause", "stopping": "stop"}
SLOWEST = 60.0  # seconds between two attempts
TROUBLES = 8  # attempts in a row that ended without a new round: then a person has to look


class Jobs(Protocol):
    """What the supervisor needs of FLARE's server."""

    def connected(self) -> set[str]: ...
    def submit(self, run: str, digest: str, sites: list[str], fewest: int) -> str: ...
    def over(self, job_id: str) -> bool: ...
    def abort(self, job_id: str) -> None: ...


@dataclass
class Attempt:
    job: str
    sites: list[str]
    round: int  # at which it began
    since: float = field(default_factory=time.monotonic)


@dataclass
class Supervisor:
    runs: Path
    store: Store
    jobs: Jobs
    log: Log
    attempts: dict[str, Attempt] = field(default_factory=dict)
    troubles: dict[str, int] = field(default_factory=dict)
    enough_since: dict[str, float] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    registered: set[str] | None = None  # with FLARE's server, at the last look; None: it did not say

    def watch(self, stop: threading.Event) -> None:
        while not stop.wait(EVERY):
            try:
                self.look()
            except HemofedError as error:  # such as a server that is just being started again
                self.log.event("supervisor", "warning", why=str(error))
            except Exception as error:
                self.log.event("supervisor failed", "error", why=repr(error))

    def server_died(self) -> None:
        """All jobs are gone with it."""
        self.attempts.clear()

    def look(self) -> None:
        self.registered = None
        self.registered = self.jobs.connected()
        for run in self.store.runs():
            if run.state in OVER or run.state == "paused":
                continue
            if run.id in self.attempts:
                self._follow(run, self.attempts[run.id])
            elif run.state in ("pausing", "stopping"):
                self._rest(run, "paused" if run.state == "pausing" else "stopped")
            elif run.state == "offered":
                if self.store.approved(run.id) >= set(run.sites):
                    self.store.state(run.id, "starting", "all sites have approved", only=["offered"])
            elif time.monotonic() >= self.not_before.get(run.id, 0.0):
                self._begin(run)

    def _begin(self, run: Run) -> None:
        approved = self.store.approved(run.id)
        ready = [site for site in run.sites if site in approved & (self.registered or set())]
        if len(ready) < run.fewest:
            self.enough_since.pop(run.id, None)
            missing = ", ".join(self._why_not(site, approved) for site in run.sites if site not in ready)
            self._move(run, "waiting", f"{len(ready)} of at least {run.fewest} sites are ready; {missing}")
            return
        since = self.enough_since.setdefault(run.id, time.monotonic())
        if len(ready) < len(run.sites) and time.monotonic() - since < PATIENCE:
            return
        self.enough_since.pop(run.id, None)
        folder = self.runs / run.id
        for name in ("ended.json", "live.json"):  # of the attempt before
            (folder / name).unlink(missing_ok=True)
        want(folder, "run")
        job = self.jobs.submit(run.id, run.digest, ready, run.fewest)
        self.attempts[run.id] = Attempt(job, ready, self._round(run))
        self.log.event("attempt", run=run.id, job=job, sites=ready)
        self._move(run, "running", "")

    def _why_not(self, site: str, approved: set[str]) -> str:
        return f"{site} {'is not connected' if site in approved else 'has not approved'}"

    def _follow(self, run: Run, attempt: Attempt) -> None:
        ended = _ended(self.runs / run.id)
        if ended is None and not self.jobs.over(attempt.job):
            if run.state in ASKED and wanted(self.runs / run.id) != ASKED[run.state]:
                want(self.runs / run.id, ASKED[run.state])  # the lead spoke while the attempt was being made
            self._take_in(run, attempt)
            return
        del self.attempts[run.id]
        how, why = ended or ("lost", "the run's process ended")
        self.log.event("attempt over", run=run.id, job=attempt.job, how=how, why=why)
        self.jobs.abort(attempt.job)  # whatever of it is left
        if how == "finished":
            self._rest(run, "finished")
        elif how == "failed":
            self._rest(run, "failed", why)
        elif how == "halted" and why in ("pause", "stop"):
            self._rest(run, "paused" if why == "pause" else "stopped")
        else:
            self._again(run, attempt, why)

    def _again(self, run: Run, attempt: Attempt, why: str) -> None:
        """From the last checkpoint; not for ever if that leads nowhere."""
        stuck = self._round(run) <= attempt.round and why != "regroup"
        self.troubles[run.id] = self.troubles.get(run.id, 0) + 1 if stuck else 0
        if self.troubles[run.id] >= TROUBLES:
            self._rest(run, "failed", f"{TROUBLES} attempts in a row came to nothing; the last one: {why}")
            return
        self.not_before[run.id] = time.monotonic() + (min(SLOWEST, 2.0 ** self.troubles[run.id]) if stuck else 0.0)
        if run.state not in ("pausing", "stopping"):
            self._move(run, "waiting", "" if why == "regroup" else f"{why}; it goes on from round {self._round(run)}")

    def _take_in(self, run: Run, attempt: Attempt) -> None:
        """Sites that came, or came back, since the attempt began are in the next one."""
        if run.state != "running" or time.monotonic() - attempt.since < PATIENCE:
            return
        live = read_live(self.runs / run.id) or {}
        outside = {site for site in run.sites if site not in attempt.sites} | set(live.get("lost", []))
        back = outside & (self.registered or set()) & self.store.approved(run.id)
        if back:
            self.log.event("taking in", run=run.id, sites=sorted(back))
            attempt.since = time.monotonic()
            want(self.runs / run.id, "regroup")

    def _rest(self, run: Run, state: str, why: str = "") -> None:
        self.troubles.pop(run.id, None)
        self.not_before.pop(run.id, None)
        self.store.state(run.id, state, why)  # type: ignore[arg-type]

    def _move(self, run: Run, state: str, why: str) -> None:
        if (run.state, run.reason) != (state, why):
            self.store.state(run.id, state, why, only=["starting", "waiting", "running"])  # type: ignore[arg-type]

    def _round(self, run: Run) -> int:
        rounds = sorted((self.runs / run.id / "checkpoint").glob("round-*.safetensors"))
        return int(rounds[-1].stem.partition("-")[2]) if rounds else -1


def _ended(folder: Path) -> tuple[str, str] | None:
    try:
        told = json.loads((folder / "ended.json").read_text("utf-8"))
        return str(told["how"]), str(told["why"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
