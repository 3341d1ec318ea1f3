"""FLARE's server as a child of the coordinator: its kit is laid out, it is started, given jobs and looked after."""

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

from pipeline.core.errors import BadService
from pipeline.core.files import write_atomically
from pipeline.flare.constants import HOME
from pipeline.flare.provisioning import ADMIN, SERVER, Kit, admin_kit, job, server_kit
from pipeline.ops.certificates import Authority, Issued, write_private
from pipeline.ops.child_processes import Kept

OVER = ("FINISHED", "FAILED", "ABORTED", "REJECTED", "ABANDONED")
QUIET = {"PYTHONWARNINGS": "ignore", "GRPC_VERBOSITY": "NONE", "TOKENIZERS_PARALLELISM": "false"}


@dataclass
class FlareServer:
    home: Path  # the coordinator's
    port: int  # on the loopback
    host: str = "localhost"  # as sites know it
    _session: Any = field(default=None, repr=False)

    def lay_out(self) -> None:
        """Kits for the server and for us, its only administrator; what jobs left behind is cleared away."""
        work, kit, admin = self.home / "flare", self.home / "kit", self.home / "admin"
        shutil.rmtree(work, ignore_errors=True)  # jobs of a killed server would stand as running for ever
        work.mkdir(parents=True)
        authority = Authority.open(self.home)
        put(kit, server_kit(str(work), self.port))
        put(admin, admin_kit(self.port))
        hosts = [self.host, "localhost", "127.0.0.1"]
        _certified(kit, "server", authority, lambda: authority.issue_server(hosts, SERVER))
        _certified(admin, "client", authority, lambda: authority.issue_client(ADMIN, "project_admin"))
        (admin / "transfer").mkdir(exist_ok=True)

    def start(self, mark: str) -> Kept:
        self.close()
        argv = [sys.executable, "-m", "pipeline.ops.child_processes", "nvflare.private.fed.app.server.server_train", "-m",
                str(self.home / "kit"), "-s", "fed_server.json", "--set", "secure_train=true", "org=hemofed",
                "config_folder=config"]  # fmt: skip
        env = {**os.environ, **QUIET, HOME: str(self.home.resolve())}
        return Kept.start(argv, self.home / "kit", env, self.home / "log" / "flare.log", mark)

    def submit(self, run: str, digest: str, sites: list[str], fewest: int) -> str:
        """The job's id."""
        folder = self.home / "admin" / "transfer" / run
        shutil.rmtree(folder, ignore_errors=True)
        put(folder, job(run, digest, sites, fewest))
        try:
            return str(self._admin().submit_job(str(folder.resolve())))
        except Exception as error:
            self.close()
            raise BadService(f"FLARE's server did not take the job ({type(error).__name__}: {error})") from error

    def over(self, job_id: str) -> bool:
        """Whether the job has ended, however."""
        try:
            status = str(self._admin().get_job_meta(job_id).get("status", ""))
        except Exception as error:
            self.close()
            raise BadService(f"FLARE's server cannot be asked ({type(error).__name__})") from error
        return status.startswith(OVER)

    def connected(self) -> set[str]:
        """Sites whose agents are registered with FLARE's server."""
        try:
            return {client.name for client in self._admin().get_system_info().client_info}
        except Exception as error:
            self.close()
            raise BadService(f"FLARE's server cannot be asked ({type(error).__name__})") from error

    def abort(self, job_id: str) -> None:
        with contextlib.suppress(Exception):
            self._admin().abort_job(job_id)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.close()

    def _admin(self) -> Any:
        if self._session is None:
            from nvflare.fuel.flare_api.flare_api import new_secure_session

            with contextlib.redirect_stdout(io.StringIO()):  # it would talk to whoever reads our output
                self._session = new_secure_session(ADMIN, str(self.home / "admin"), timeout=10.0)
        return self._session


def put(folder: Path, kit: Kit) -> None:
    for name, text in kit.items():
        write_atomically(folder / name, text.encode())


def _certified(kit: Path, name: str, authority: Authority, issue: Callable[[], Issued]) -> None:
    """Once for all restarts: FLARE signs its sites' tokens with this key, and a site that comes with a token of another
    key is not even answered."""
    certificate, key = kit / "startup" / f"{name}.crt", kit / "startup" / f"{name}.key"
    write_atomically(kit / "startup" / "rootCA.pem", authority.pem.encode())
    if key.exists() and certificate.exists() and authority.stands(certificate.read_text("utf-8")):
        return
    issued = issue()
    key.unlink(missing_ok=True)
    write_private(key, issued.key.encode())
    write_atomically(certificate, issued.certificate.encode())
