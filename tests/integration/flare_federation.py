"""A federation of real processes on this machine, without the web service: FLARE's server, and a client for each site."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.files import write_atomically
from pipeline.engines.flare_server import FlareServer, write_kit
from pipeline.flare.provisioning import build_client_kit
from pipeline.ops.certificates import CertificateAuthority
from pipeline.ops.child_processes import ChildProcess, kill_by_mark
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.records.run_control import request_state
from pipeline.service.storage.home import CoordinatorHome
from pipeline.study.offer import StudyOffer, create_offer
from pipeline.study.schema import Study
from privacy.ledger import keys
from privacy.ledger.records import LedgerBudget
from sites.agent.flare_client import client_argv, flare_env
from sites.governance.approvals import approve_offer
from sites.governance.home import SiteHome
from sites.governance.settings import SiteSettings


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class FlareFederation:
    folder: Path
    mark: str
    homes: dict[str, Path] = field(default_factory=dict)
    clients: dict[str, ChildProcess] = field(default_factory=dict)
    env_by_site: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # additional variables of its processes
    server: FlareServer | None = None
    server_process: ChildProcess | None = None

    @property
    def home(self) -> Path:
        return self.folder / "coordinator"

    def start(self, sites: Mapping[str, SiteSettings], unit: str = "example", epsilon: float = 1e6) -> None:
        home = CoordinatorHome.create(self.home, "test", "localhost", 8443)
        authority = CertificateAuthority.open(home.path)
        self.server = FlareServer(home.path, find_free_port())
        self.server.provision_kits()
        self.server_process = self.server.start(self.mark)
        for site, settings in sites.items():
            path = self.folder / "sites" / site
            SiteHome.create(path, site, f"{site}-data", unit, LedgerBudget(epsilon=epsilon, delta=1e-5))
            settings.save(path)
            write_kit(path / "kit", build_client_kit(site, "localhost", self.server.port))
            issued = authority.issue_client(site)
            write_kit(path / "kit", {"startup/client.crt": issued.certificate_pem, "startup/rootCA.pem": authority.pem})
            key_path = path / "kit" / "startup" / "client.key"
            with os.fdopen(os.open(key_path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
                out.write(issued.key_pem)
            self.homes[site] = path
            coordinator_key = keys.public_hex(keys.load_key(self.home / "key.pem"))
            membership = {"site": site, "coordinator": {"key": coordinator_key}}
            write_atomically(path / "membership.json", json.dumps(membership).encode())
            self.start_client(site)

    def start_client(self, site: str) -> None:
        path = self.homes[site]
        env = {**os.environ, **flare_env(path), **self.env_by_site.get(site, {})}
        self.clients[site] = ChildProcess.start(
            client_argv(path, site), path / "kit", env, path / "log" / "flare.log", self.mark
        )

    def offer_study(self, run: str, study: Study, approved: bool = True) -> StudyOffer:
        """Offers the study to all sites; `approved`: all officers approve it."""
        folder = RunFolder.create(self.home / "runs" / run, study)
        site_keys = {site: keys.public_hex(SiteHome.open(path).agent_key) for site, path in self.homes.items()}
        offer = create_offer(run, study, site_keys, keys.public_hex(keys.load_key(self.home / "key.pem")))
        offer_json = offer.model_dump_json().encode()
        folder.write_offer(offer)
        request_state(folder.path, "run")
        for path in self.homes.values():
            write_atomically(path / "offers" / f"{offer.digest}.json", offer_json)
            if approved:
                officer_key = keys.load_key(path / "officer.pem")
                approve_offer(SiteHome.open(path), offer, officer_key, datetime.now(UTC) + timedelta(days=1))
        return offer

    def run_job(
        self, offer: StudyOffer, seconds: float = 120, while_waiting: Callable[[], None] = lambda: None
    ) -> AttemptOutcome:
        """Submits the run's job once, waits for its end and returns how it ended."""
        server = self.server
        assert server is not None
        wait_until(lambda: server.connected_sites() >= set(offer.site_keys), 60)
        run_path = self.home / "runs" / offer.run
        outcome_path = run_path / AttemptOutcome.FILE_NAME
        outcome_path.unlink(missing_ok=True)
        server.submit_job(offer.run, offer.digest, list(offer.site_keys), 1)

        def has_ended() -> bool:
            while_waiting()
            return outcome_path.exists()

        wait_until(has_ended, seconds)
        return AttemptOutcome.read(run_path)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for process in [*self.clients.values(), *([self.server_process] if self.server_process else [])]:
            process.stop(0.5)
        kill_by_mark(self.mark)


def wait_until(condition: Callable[[], bool], seconds: float, interval: float = 0.2) -> None:
    """Polls until the condition holds; an exception counts as false, except at the end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except Exception:
            if time.monotonic() + interval > deadline:
                raise
        time.sleep(interval)
    raise TimeoutError(f"the condition was still false after {seconds:g} s: {condition}")


@contextmanager
def start_federation(
    folder: Path,
    sites: Mapping[str, SiteSettings],
    env_by_site: Mapping[str, Mapping[str, str]] | None = None,
    epsilon: float = 1e6,
) -> Iterator[FlareFederation]:
    mark = f"test-{folder.name}-{time.monotonic_ns()}"
    federation = FlareFederation(folder, mark, env_by_site=env_by_site or {})
    try:
        federation.start(sites, epsilon=epsilon)
        yield federation
    finally:
        federation.close()
