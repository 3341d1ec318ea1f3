"""FLARE's server as a child process of the coordinator: startup kit, start, jobs and their state."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.errors import ServiceError
from pipeline.core.files import write_atomically
from pipeline.flare.constants import COORDINATOR_HOME_ENV
from pipeline.flare.provisioning import (
    ADMIN_NAME,
    SERVER_NAME,
    StartupKit,
    build_admin_kit,
    build_job,
    build_server_kit,
)
from pipeline.ops.certificates import CertificateAuthority, IssuedCertificate, write_private_file
from pipeline.ops.child_processes import ChildProcess

ENDED_STATUSES = ("FINISHED", "FAILED", "ABORTED", "REJECTED", "ABANDONED")
QUIET_ENV = {"PYTHONWARNINGS": "ignore", "GRPC_VERBOSITY": "NONE", "TOKENIZERS_PARALLELISM": "false"}


@dataclass
class FlareServer:
    """Starts FLARE's server and manages its jobs through its administration interface."""

    home: Path  # of the coordinator
    port: int  # on the loopback
    host: str = "localhost"  # as sites know it
    _session: Any = field(default=None, repr=False)

    def provision_kits(self) -> None:
        """Writes startup kits of the server and of its only administrator; removes the workspace of former jobs."""
        workspace, server_folder, admin_folder = self.home / "flare", self.home / "kit", self.home / "admin"
        shutil.rmtree(workspace, ignore_errors=True)  # else the jobs of a killed server would count as running for ever
        workspace.mkdir(parents=True)
        authority = CertificateAuthority.open(self.home)
        write_kit(server_folder, build_server_kit(str(workspace), self.port))
        write_kit(admin_folder, build_admin_kit(self.port))
        hosts = [self.host, "localhost", "127.0.0.1"]
        _ensure_certificate(server_folder, "server", authority, lambda: authority.issue_server(hosts, SERVER_NAME))
        _ensure_certificate(
            admin_folder, "client", authority, lambda: authority.issue_client(ADMIN_NAME, "project_admin")
        )
        (admin_folder / "transfer").mkdir(exist_ok=True)

    def start(self, mark: str) -> ChildProcess:
        self.close()
        argv = [
            sys.executable,
            "-m",
            "pipeline.ops.child_processes",
            "nvflare.private.fed.app.server.server_train",
            "-m",
            str(self.home / "kit"),
            "-s",
            "fed_server.json",
            "--set",
            "secure_train=true",
            "org=hemofed",
            "config_folder=config",
        ]
        env = {**os.environ, **QUIET_ENV, COORDINATOR_HOME_ENV: str(self.home.resolve())}
        return ChildProcess.start(argv, self.home / "kit", env, self.home / "log" / "flare.log", mark)

    def submit_job(self, run: str, digest: str, sites: list[str], min_sites: int) -> str:
        """Returns the job's id."""
        folder = self.home / "admin" / "transfer" / run
        shutil.rmtree(folder, ignore_errors=True)
        write_kit(folder, build_job(run, digest, sites, min_sites))
        try:
            return str(self._admin_session().submit_job(str(folder.resolve())))
        except Exception as error:
            self.close()
            raise ServiceError(f"FLARE's server rejected the job ({type(error).__name__}: {error})") from error

    def has_ended(self, job_id: str) -> bool:
        """Whether the job has ended, successfully or not."""
        try:
            status = str(self._admin_session().get_job_meta(job_id).get("status", ""))
        except Exception as error:
            self.close()
            raise ServiceError(f"FLARE's server does not answer ({type(error).__name__})") from error
        return status.startswith(ENDED_STATUSES)

    def connected_sites(self) -> set[str]:
        """Sites whose agents are registered with FLARE's server."""
        try:
            return {client.name for client in self._admin_session().get_system_info().client_info}
        except Exception as error:
            self.close()
            raise ServiceError(f"FLARE's server does not answer ({type(error).__name__})") from error

    def abort_job(self, job_id: str) -> None:
        with contextlib.suppress(Exception):
            self._admin_session().abort_job(job_id)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()

    def _admin_session(self) -> Any:
        if self._session is None:
            from nvflare.fuel.flare_api.flare_api import new_secure_session

            with contextlib.redirect_stdout(io.StringIO()):  # FLARE prints to stdout
                self._session = new_secure_session(ADMIN_NAME, str(self.home / "admin"), timeout=10.0)
        return self._session


def write_kit(folder: Path, startup_kit: StartupKit) -> None:
    for name, text in startup_kit.items():
        write_atomically(folder / name, text.encode())


def _ensure_certificate(
    kit_folder: Path, name: str, authority: CertificateAuthority, issue: Callable[[], IssuedCertificate]
) -> None:
    """Keeps the key over restarts: FLARE signs its sites' tokens with it and ignores sites with a token of another key."""
    certificate, key = kit_folder / "startup" / f"{name}.crt", kit_folder / "startup" / f"{name}.key"
    write_atomically(kit_folder / "startup" / "rootCA.pem", authority.pem.encode())
    if key.exists() and certificate.exists() and authority.is_current(certificate.read_text("utf-8")):
        return
    issued = issue()
    key.unlink(missing_ok=True)
    write_private_file(key, issued.key_pem.encode())
    write_atomically(certificate, issued.certificate_pem.encode())
