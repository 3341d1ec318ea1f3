"""A federation of real processes on the loopback, without the web service: FLARE's server, and a client for each site."""

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

from pipeline.coordinator.live_status import request_state
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.files import write_atomically
from pipeline.engines.flare_server import FlareServer, write_kit
from pipeline.flare.provisioning import build_client_kit
from pipeline.ops.certificates import CertificateAuthority
from pipeline.ops.child_processes import ChildProcess, kill_by_mark
from pipeline.service.storage.home import CoordinatorHome
from pipeline.study.offer import StudyOffer, create_offer
from pipeline.study.schema import Study
from privacy.ledger import keys
from privacy.ledger.records import LedgerBudget
from sites.agent.flare_client import client_argv, flare_env
from sites.governance.approvals import approve_offer
from sites.governance.home import SiteHome
from sites.governance.settings import SiteSettings


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Stage:
    folder: Path
    mark: str
    homes: dict[str, Path] = field(default_factory=dict)
    clients: dict[str, ChildProcess] = field(default_factory=dict)
    extra: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # environment of a site's processes
    server: FlareServer | None = None
    child: ChildProcess | None = None

    @property
    def home(self) -> Path:
        return self.folder / "coordinator"

    def raise_(self, sites: Mapping[str, SiteSettings], unit: str = "example", epsilon: float = 1e6) -> None:
        home = CoordinatorHome.create(self.home, "test", "localhost", 8443)
        authority = CertificateAuthority.open(home.path)
        self.server = FlareServer(home.path, free_port())
        self.server.provision_kits()
        self.child = self.server.start(self.mark)
        for site, settings in sites.items():
            path = self.folder / "sites" / site
            SiteHome.create(path, site, f"{site}-data", unit, LedgerBudget(epsilon=epsilon, delta=1e-5))
            settings.save(path)
            write_kit(path / "kit", build_client_kit(site, "localhost", self.server.port))
            issued = authority.issue_client(site)
            write_kit(path / "kit", {"startup/client.crt": issued.certificate_pem, "startup/rootCA.pem": authority.pem})
            key = path / "kit" / "startup" / "client.key"
            with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
                out.write(issued.key_pem)
            self.homes[site] = path
            key = keys.public_hex(keys.load_key(self.home / "key.pem"))
            write_atomically(path / "membership.json", json.dumps({"site": site, "coordinator": {"key": key}}).encode())
            self.join(site)

    def join(self, site: str) -> None:
        path = self.homes[site]
        env = {**os.environ, **flare_env(path), **self.extra.get(site, {})}
        self.clients[site] = ChildProcess.start(
            client_argv(path, site), path / "kit", env, path / "log" / "flare.log", self.mark
        )

    def offered(self, run: str, study: Study, approved: bool = True) -> StudyOffer:
        """Offered to all and approved by all, or by nobody."""
        folder = RunFolder.create(self.home / "runs" / run, study)
        agents = {site: keys.public_hex(SiteHome.open(path).agent_key) for site, path in self.homes.items()}
        made = create_offer(run, study, agents, keys.public_hex(keys.load_key(self.home / "key.pem")))
        write_atomically(folder.path / "offer.json", made.model_dump_json().encode())
        request_state(folder.path, "run")
        for path in self.homes.values():
            write_atomically(path / "offers" / f"{made.digest}.json", made.model_dump_json().encode())
            if approved:
                approve_offer(
                    SiteHome.open(path),
                    made,
                    keys.load_key(path / "officer.pem"),
                    datetime.now(UTC) + timedelta(days=1),
                )
        return made

    def run(
        self, made: StudyOffer, seconds: float = 120, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Submits the run's job once and waits for its end: what ended.json says."""
        assert self.server is not None
        until(lambda: self.server is not None and self.server.connected_sites() >= set(made.site_keys), 60)
        ended = self.home / "runs" / made.run / "ended.json"
        ended.unlink(missing_ok=True)
        self.server.submit_job(made.run, made.digest, list(made.site_keys), 1)

        def over() -> bool:
            meanwhile()
            return ended.exists()

        until(over, seconds)
        told: dict[str, str] = json.loads(ended.read_text())
        return told

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for kept in [*self.clients.values(), *([self.child] if self.child else [])]:
            kept.stop(0.5)
        kill_by_mark(self.mark)


def until(what: Callable[[], bool], seconds: float, every: float = 0.2) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if what():
                return
        except Exception as error:
            last = error
            if time.monotonic() + every > end:
                raise last from None
        time.sleep(every)
    raise TimeoutError(f"not within {seconds} s: {what}")


@contextmanager
def federation(
    folder: Path,
    sites: Mapping[str, SiteSettings],
    extra: Mapping[str, Mapping[str, str]] | None = None,
    epsilon: float = 1e6,
) -> Iterator[Stage]:
    stage = Stage(folder, f"test-{folder.name}-{time.monotonic_ns()}", extra=extra or {})
    try:
        stage.raise_(sites, epsilon=epsilon)
        yield stage
    finally:
        stage.close()
