"""The site's agent: heartbeats, offers, approval notices, model downloads, and FLARE's client as a child process.

The agent stores offers for the officer and reports approvals to the coordinator. It does not decide about tasks: FLARE's
job process checks the site's policy before every message (sites/worker/policy.py).
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

from pipeline.core.errors import HemofedError, RunFolderError, ServiceError
from pipeline.core.files import exclusive_lock
from pipeline.ops.child_processes import ChildProcess, RestartingProcess, kill_by_mark
from sites.agent.coordinator_client import CoordinatorClient
from sites.agent.enrolment import SiteMembership
from sites.agent.environment import child_environment, find_disk_space_problem, free_disk_gb
from sites.agent.event_log import AgentLog, LinePrinter
from sites.agent.http import AccessDeniedError
from sites.agent.model_download import ModelDownloader
from sites.agent.offers_sync import sync_offers
from sites.agent.status import AgentStatus, utc_timestamp
from sites.governance.approvals import collect_approval_notices
from sites.governance.home import SiteHome
from sites.governance.settings import SiteSettings

HEARTBEAT_SECONDS, MAX_HEARTBEAT_SECONDS, DENIED_RETRY_SECONDS = 3.0, 30.0, 60.0  # between heartbeats
POLL_SECONDS = 0.25
FLARE_REGISTRATION_TIMEOUT_SECONDS = 30.0  # of FLARE's client at its server
STATUS_REFRESH_SECONDS = 10.0  # status.json is written at least this often
ACTIVE_RUN_STATES = frozenset({"starting", "running", "waiting", "pausing", "stopping"})
ArgvBuilder = Callable[[Path, str], list[str]]


class SiteAgent:
    """`build_argv`: of the child process; None: FLARE's client. `print_line`: receives the messages for the user."""

    def __init__(
        self,
        home: Path,
        build_argv: ArgvBuilder | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        print_line: LinePrinter = lambda line: None,
    ) -> None:
        self.home, self._build_argv, self._heartbeat_seconds = home.resolve(), build_argv, heartbeat_seconds
        self._membership = SiteMembership.load(self.home)
        self._site_home = SiteHome.open(self.home)
        self._agent_log = AgentLog(self.home, print_line)
        self._downloaded_models: list[str] = []  # appended by the download thread
        self._num_failures, self._num_exits_reported = 0, 0
        self._unregistered_since: float | None = None  # since when our client is not registered at FLARE's server
        self._flare_process = RestartingProcess(self._start_flare_client)
        self._last_written = (0.0, "")
        self.status = AgentStatus(self._membership.site, self._membership.coordinator.name, self._membership.url)

    def run(self, stop: threading.Event, once: bool = False) -> None:
        """`once`: sends one heartbeat and downloads models, without FLARE's client."""
        with exclusive_agent_lock(self.home), CoordinatorClient(self._membership) as coordinator_client:
            if num_killed := kill_by_mark(process_mark(self.home)):
                self._agent_log.log_event("processes of a killed agent were ended", "warning", processes=num_killed)
            self._agent_log.log_event("the agent starts", versions=self.status.versions)
            downloader = ModelDownloader(coordinator_client, self.home, self._on_model_downloaded).start()
            next_heartbeat = 0.0
            try:
                while not stop.is_set():
                    if time.monotonic() >= next_heartbeat:
                        next_heartbeat = time.monotonic() + self._send_heartbeat(coordinator_client, downloader)
                    if once and self._is_single_pass_done(downloader):
                        break
                    if not once:
                        self._supervise_flare_client()
                    self._write_status()
                    stop.wait(POLL_SECONDS)
            finally:
                downloader.stop()
                self._flare_process.stop()
                self.status = replace(self.status, state="stopped", flare="off", connected_since=None, run=None)
                self._write_status()
                self._agent_log.log_event("the agent has stopped")

    def _is_single_pass_done(self, downloader: ModelDownloader) -> bool:
        if self.status.problem:
            raise ServiceError(self.status.problem)
        return downloader.is_idle

    def _send_heartbeat(self, coordinator_client: CoordinatorClient, downloader: ModelDownloader) -> float:
        """Returns the seconds until the next heartbeat."""
        try:
            self._site_home.ledger.refresh()
            notices = collect_approval_notices(self._site_home.ledger)
            sent_at = datetime.now(UTC)
            reply = coordinator_client.send_heartbeat(
                self.status.reported_fields(), notices["approvals"], notices["revoked"]
            )
            local_time = sent_at + (datetime.now(UTC) - sent_at) / 2
            sync_result = sync_offers(self._site_home, self._membership, reply, local_time, self._agent_log)
            disk_problem = find_disk_space_problem(self.home, SiteSettings.load(self.home).limits)
        except (HemofedError, OSError) as error:
            return self._handle_failure(error)
        downloader.enqueue_models(reply.runs)
        self._unregistered_since = (
            None if reply.registered is not False else self._unregistered_since or time.monotonic()
        )
        warnings = (*sync_result.warnings, *([disk_problem] if disk_problem else []))
        for text in warnings:
            self._agent_log.announce_once(("warning", text.partition(";")[2] or text), text, "warning")
        if self.status.state != "connected":
            self._agent_log.announce(f"connected to {self._membership.coordinator.name} at {self._membership.url}")
        active_run = next((run_info.id for run_info in reply.runs if run_info.state in ACTIVE_RUN_STATES), None)
        self.status = replace(
            self.status,
            state="connected",
            problem="",
            last_heartbeat=utc_timestamp(),
            connected_since=self.status.connected_since or utc_timestamp(),
            pending_offers=sync_result.pending_offers,
            warnings=warnings,
            run=active_run,
        )
        self._num_failures = 0
        return self._heartbeat_seconds

    def _handle_failure(self, error: Exception) -> float:
        """Exponential backoff with jitter, so that not all sites reconnect at once. Returns the seconds until the next heartbeat."""
        is_denied, text = isinstance(error, AccessDeniedError), str(error)
        if text != self.status.problem:
            self._agent_log.announce(text, "warning")
        self.status = replace(
            self.status, state="denied" if is_denied else "disconnected", problem=text, connected_since=None, run=None
        )
        with contextlib.suppress(HemofedError, OSError):
            self._site_home = SiteHome.open(self.home)  # the key or the ledger may have been replaced
        self._num_failures = min(self._num_failures + 1, 10)
        backoff_seconds = min(MAX_HEARTBEAT_SECONDS, self._heartbeat_seconds * 2**self._num_failures)
        return DENIED_RETRY_SECONDS if is_denied else backoff_seconds * random.uniform(0.7, 1.0)

    def _on_model_downloaded(self, run: str, name: str, file: str, problem: str) -> None:
        if problem:
            self._agent_log.announce_once(
                ("model", run, name, problem),
                f"the model {name} of {run} could not be downloaded: {problem}",
                "warning",
            )
            return
        self._downloaded_models.append(f"{run}/{name}")
        self._agent_log.announce(f"downloaded the model {name} of {run}: {file}")

    def _supervise_flare_client(self) -> None:
        """Keeps FLARE's client running, unless the coordinator denies access or disk space is missing."""
        try:
            is_idle = self._flare_process.child is None
            disk_problem = find_disk_space_problem(self.home, SiteSettings.load(self.home).limits) if is_idle else None
            if self.status.state == "denied":
                self._flare_process.stop()
            elif self._is_registration_stuck():
                self._agent_log.announce("FLARE's client is not registered at its server; restarting it", "warning")
                self._flare_process.stop(0)
            elif disk_problem is None:
                self._flare_process.tick()
        except (HemofedError, OSError) as error:
            self._agent_log.announce_once(("start", str(error)), f"FLARE's client does not start: {error}", "error")
        if self._flare_process.num_exits > self._num_exits_reported:
            self._num_exits_reported = self._flare_process.num_exits
            log_file = self.home / "log" / "flare.log"
            self._agent_log.announce(
                f"FLARE's client ended with code {self._flare_process.exit_codes[-1]}; see {log_file}", "warning"
            )
        is_running = self._flare_process.child is not None and self._flare_process.child.is_alive
        self.status = replace(
            self.status, flare="running" if is_running else "restarting" if self._flare_process.exit_codes else "off"
        )

    def _is_registration_stuck(self) -> bool:
        """Still not registered after the timeout, for example with the token of a former server process."""
        process, monotonic_now = self._flare_process.child, time.monotonic()
        return (
            process is not None
            and self._unregistered_since is not None
            and monotonic_now - max(process.started_at, self._unregistered_since) > FLARE_REGISTRATION_TIMEOUT_SECONDS
        )

    def _start_flare_client(self) -> ChildProcess:
        settings, site = SiteSettings.load(self.home), self._membership.site
        env = child_environment(self._membership.url, settings.limits)
        build_argv = self._build_argv
        if build_argv is None:
            from sites.agent.flare_client import flare_env, prepare_client_argv

            build_argv, env = prepare_client_argv, env | flare_env(self.home)
        return ChildProcess.start(
            build_argv(self.home, site), self.home, env, self.home / "log" / "flare.log", process_mark(self.home)
        )

    def _write_status(self) -> None:
        """Writes status.json after changes and regularly. Ignores a full disk."""
        disk_free_gb, models = round(free_disk_gb(self.home), 1), tuple(self._downloaded_models)
        self.status = replace(self.status, disk_free_gb=disk_free_gb, models=models, written_at=utc_timestamp())
        monotonic_now = time.monotonic()
        status_text = repr(replace(self.status, written_at="", last_heartbeat="", disk_free_gb=0))
        if status_text != self._last_written[1] or monotonic_now - self._last_written[0] > STATUS_REFRESH_SECONDS:
            with contextlib.suppress(HemofedError, OSError):
                self.status.save(self.home)
                self._last_written = (monotonic_now, status_text)


@contextlib.contextmanager
def exclusive_agent_lock(home: Path) -> Iterator[None]:
    """Allows one agent for each home, and none during a restore or `site leave`."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(home))
        except RunFolderError as error:
            raise RunFolderError(f"an agent already runs for {home}; stop it first") from error
        yield


def process_mark(home: Path) -> str:
    """Identifies the processes of this home."""
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:32]
