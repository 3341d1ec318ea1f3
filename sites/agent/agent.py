"""A site's agent: beats, offers, approvals, models, and FLARE's client as its child, until it is told to stop.

It decides nothing about work. It brings what is offered to where the officer finds it and tells what he has approved;
whether a message may be worked on is asked in FLARE's job process, each time (sites/worker/policy.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.core.errors import BadRun, BadService, HemofedError
from pipeline.core.files import alone_in
from pipeline.ops.child_processes import Kept, Restarting, sweep
from sites.agent.coordinator_client import Link
from sites.agent.enrolment import Membership
from sites.agent.environment import environment, free_gb, no_room
from sites.agent.event_log import Notes, Say
from sites.agent.http import Denied
from sites.agent.model_download import Fetching
from sites.agent.offers_sync import take
from sites.agent.status import Status, now
from sites.governance.approvals import told
from sites.governance.home import Home
from sites.governance.settings import Settings

EVERY, SLOWEST, WHEN_DENIED = 3.0, 30.0, 60.0  # seconds between beats
TICK = 0.25
STUCK = 30.0  # seconds that FLARE's client may take to be known to its server
FRESH = 10.0  # seconds after which status.json is written even if nothing is new
AT_WORK = frozenset({"starting", "running", "waiting", "pausing", "stopping"})
Argv = Callable[[Path, str], list[str]]


class Agent:
    """`argv`: what to keep running instead of FLARE's client. `say`: takes the lines that a person waits for."""

    def __init__(
        self, home: Path, argv: Argv | None = None, every: float = EVERY, say: Say = lambda line: None
    ) -> None:
        self.home, self._argv, self._every = home.resolve(), argv, every
        self._member = Membership.load(self.home)
        self._own = Home.open(self.home)
        self._notes = Notes(self.home, say)
        self._models: list[str] = []  # that came, told by another thread
        self._failures, self._deaths = 0, 0
        self._strange: float | None = None  # since when FLARE's server does not know us
        self._child = Restarting(self._start)
        self._written = (0.0, "")
        self.status = Status(self._member.site, self._member.coordinator.name, self._member.url)

    def run(self, stop: threading.Event, once: bool = False) -> None:
        """`once`: a single beat and the models that it names, without FLARE's client."""
        with alone(self.home), Link(self._member) as link:
            if left := sweep(mark_of(self.home)):
                self._notes.note("what an agent that was killed had left was ended", "warning", processes=left)
            self._notes.note("the agent starts", versions=self.status.versions)
            fetching, due = Fetching(link, self.home, self._fetched).start(), 0.0
            try:
                while not stop.is_set():
                    if time.monotonic() >= due:
                        due = time.monotonic() + self._beat(link, fetching)
                    if once and self._done(fetching):
                        break
                    if not once:
                        self._keep()
                    self._write()
                    stop.wait(TICK)
            finally:
                fetching.stop()
                self._child.stop()
                self.status = replace(self.status, state="stopped", flare="off", connected_since=None, run=None)
                self._write()
                self._notes.note("the agent has stopped")

    def _done(self, fetching: Fetching) -> bool:
        if self.status.problem:
            raise BadService(self.status.problem)
        return fetching.idle

    def _beat(self, link: Link, fetching: Fetching) -> float:
        """Seconds until the next."""
        try:
            self._own.ledger.refresh()
            said = told(self._own.ledger)
            began = datetime.now(UTC)
            heard = link.beat(self.status.outward(), said["approvals"], said["withdrawn"])
            here = began + (datetime.now(UTC) - began) / 2
            news = take(self._own, self._member, heard, here, self._notes)
            full = no_room(self.home, Settings.load(self.home).limits)
        except (HemofedError, OSError) as error:
            return self._failed(error)
        fetching.take(heard.runs)
        self._strange = None if heard.registered is not False else self._strange or time.monotonic()
        warnings = (*news.warnings, *([full] if full else []))
        for text in warnings:
            self._notes.once(("warning", text.partition(";")[2] or text), text, "warning")
        if self.status.state != "connected":
            self._notes.tell(f"connected to {self._member.coordinator.name} at {self._member.url}")
        at_work = next((run.id for run in heard.runs if run.state in AT_WORK), None)
        self.status = replace(
            self.status, state="connected", problem="", last_beat=now(), connected_since=self.status.connected_since or now(),
            waiting=news.waiting, warnings=warnings, run=at_work,
        )  # fmt: skip
        self._failures = 0
        return self._every

    def _failed(self, error: Exception) -> float:
        """Not all sites come back at the same moment after the coordinator was away."""
        denied, text = isinstance(error, Denied), str(error)
        if text != self.status.problem:
            self._notes.tell(text, "warning")
        self.status = replace(
            self.status, state="denied" if denied else "disconnected", problem=text, connected_since=None, run=None
        )
        with contextlib.suppress(HemofedError, OSError):
            self._own = Home.open(self.home)  # the key or the ledger may have been replaced meanwhile
        self._failures = min(self._failures + 1, 10)
        slower = min(SLOWEST, self._every * 2**self._failures)
        return WHEN_DENIED if denied else slower * random.uniform(0.7, 1.0)

    def _fetched(self, run: str, name: str, file: str, why: str) -> None:
        if why:
            self._notes.once(("model", run, name, why), f"the model {name} of {run} did not come: {why}", "warning")
            return
        self._models.append(f"{run}/{name}")
        self._notes.tell(f"the model {name} of {run} is here: {file}")

    def _keep(self) -> None:
        """FLARE's client runs, unless the coordinator has shut this site out, or there is no room for work to begin."""
        try:
            idle = self._child.kept is None
            full = no_room(self.home, Settings.load(self.home).limits) if idle else None
            if self.status.state == "denied":
                self._child.stop()
            elif self._is_stuck():
                self._notes.tell("FLARE's server does not know this site; its client is started again", "warning")
                self._child.stop(0)
            elif full is None:
                self._child.tick()
        except (HemofedError, OSError) as error:
            self._notes.once(("start", str(error)), f"FLARE's client cannot be started: {error}", "error")
        if self._child.deaths > self._deaths:
            self._deaths = self._child.deaths
            log = self.home / "log" / "flare.log"
            self._notes.tell(f"FLARE's client ended with code {self._child.ended[-1]}; see {log}", "warning")
        running = self._child.kept is not None and self._child.kept.alive
        self.status = replace(self.status, flare="running" if running else "restarting" if self._child.ended else "off")

    def _is_stuck(self) -> bool:
        """Long enough up to have registered, and still unknown there: such as with a token of a server that is no more."""
        kept, now = self._child.kept, time.monotonic()
        return kept is not None and self._strange is not None and now - max(kept.since, self._strange) > STUCK

    def _start(self) -> Kept:
        settings, site = Settings.load(self.home), self._member.site
        env = environment(self._member.url, settings.limits)
        argv = self._argv
        if argv is None:
            from sites.agent.flare_client import flare_argv, flare_env

            argv, env = flare_argv, env | flare_env(self.home)
        return Kept.start(argv(self.home, site), self.home, env, self.home / "log" / "flare.log", mark_of(self.home))

    def _write(self) -> None:
        """When something is new, or from time to time. A full disk does not end the agent."""
        free, models = round(free_gb(self.home), 1), tuple(self._models)
        self.status = replace(self.status, disk_free_gb=free, models=models, at=now())
        at, seen = time.monotonic(), repr(replace(self.status, at="", last_beat="", disk_free_gb=0))
        if seen != self._written[1] or at - self._written[0] > FRESH:
            with contextlib.suppress(HemofedError, OSError):
                self.status.save(self.home)
                self._written = (at, seen)


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """One agent a home, and none while the home is restored or leaves."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(alone_in(home))
        except BadRun as error:
            raise BadRun(f"an agent runs for {home} already; stop it first") from error
        yield


def mark_of(home: Path) -> str:
    """By which processes of this home are known."""
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:32]
