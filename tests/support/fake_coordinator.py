"""A coordinator for tests of the site's agent: a FastAPI service over real TLS with a certificate authority of its own."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from privacy.ledger import keys
from privacy.ledger.records import LedgerBudget
from sites.governance.home import SiteHome
from tests.support.machine import wait_for

COORDINATOR_NAME = "test-coordinator"
SITE = "north"
INVITATION_TOKEN = "secret-token-0123"


def make_site_home(folder: Path) -> SiteHome:
    """The home of the site that the fake coordinator has invited."""
    return SiteHome.create(folder / "home", SITE, "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5))


class FakeAuthority:
    """A certificate authority that signs for nine days."""

    def __init__(self, name: str) -> None:
        self.key = rsa.generate_private_key(65537, 2048)
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self.name, self.key.public_key(), is_ca=True)
        self.pem = self.certificate.public_bytes(Encoding.PEM).decode()

    def _sign(self, subject: x509.Name, public_key: Any, is_ca: bool, alt_names: Any = None) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=9))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if alt_names is not None:
            builder = builder.add_extension(alt_names, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def sign_client_certificate(self, csr: str) -> str:
        request = x509.load_pem_x509_csr(csr.encode())
        return self._sign(request.subject, request.public_key(), is_ca=False).public_bytes(Encoding.PEM).decode()

    def write_server_certificate(self, folder: Path) -> tuple[Path, Path]:
        """Certificate and key of localhost."""
        key = rsa.generate_private_key(65537, 2048)
        alt_names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        certificate = self._sign(subject, key.public_key(), is_ca=False, alt_names=alt_names)
        (folder / "web.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        (folder / "web.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return folder / "web.crt", folder / "web.key"


_make_authority = cache(FakeAuthority)  # generating RSA keys takes time


def certificate_authority(name: str = "test") -> FakeAuthority:
    """One for each name and test session."""
    return _make_authority(name)


@contextlib.contextmanager
def serve_tls(app: Any, folder: Path, port: int = 0, authority: FakeAuthority | None = None) -> Iterator[int]:
    """Serves the app with uvicorn and yields the port."""
    certificate, key = (authority or certificate_authority()).write_server_certificate(folder)
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        log_level="error",
        log_config=None,  # logging.config would close absl's handler, and with it the stream that pytest captures
        timeout_graceful_shutdown=1,
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


class FakeCoordinator:
    """The site half of the service. Tests set its replies and read what it received as plain attributes."""

    def __init__(self, authority: FakeAuthority | None = None) -> None:
        self.ca = authority or certificate_authority()
        self.key = keys.generate_key()
        self.invitations = {INVITATION_TOKEN: SITE}  # token -> site
        self.kit = {
            "startup/fed_client.json": "{}",
            "local/resources.json": '{"a": 1}',
            "startup/rootCA.pem": self.ca.pem,
        }
        self.reply_overrides: dict[str, Any] = {}  # fields of the enrolment reply
        self.offers: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.models: dict[tuple[str, str], bytes] = {}
        self.heartbeats: list[dict[str, Any]] = []
        self.downloads: list[tuple[str, str]] = []
        self.enrolments: list[dict[str, Any]] = []
        self.has_left = False
        self.error_statuses: list[int] = []  # HTTP statuses of the next replies
        self.clock_offset = timedelta()
        self.credential = "the-credential"
        self.app = self._make_app()

    def _make_app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def authenticate(request: Request, call_next: Any) -> Any:
            if self.error_statuses:
                return JSONResponse({"error": "a test ordered this error"}, self.error_statuses.pop(0))
            open_paths = ("/ca.pem", "/site/enrol")
            if (
                request.url.path not in open_paths
                and request.headers.get("authorization") != f"Bearer {self.credential}"
            ):
                return JSONResponse({"error": "the credential is missing or wrong"}, 401)
            return await call_next(request)

        @app.get("/ca.pem")
        def send_ca() -> Response:
            return Response(self.ca.pem, media_type="application/x-pem-file")

        @app.post("/site/enrol")
        def enrol(payload: dict[str, Any]) -> Any:
            statement = {
                "site": payload["site"],
                "token_sha256": hashlib.sha256(payload["token"].encode()).hexdigest(),
                "csr_sha256": hashlib.sha256(payload["csr"].encode()).hexdigest(),
            }
            if self.invitations.get(payload["token"]) != payload["site"]:
                return JSONResponse({"error": "this invitation is unknown, used or expired"}, 403)
            if not keys.is_valid_signature(payload["key"], "possession", statement, payload["proof"]):
                return JSONResponse({"error": "the proof is wrong"}, 403)
            self.invitations.pop(payload["token"])
            self.enrolments.append(payload)
            coordinator = {
                "name": COORDINATOR_NAME,
                "key": keys.public_hex(self.key),
                "host": "localhost",
                "port": 1,
            }
            return {
                "credential": self.credential,
                "certificate": self.ca.sign_client_certificate(payload["csr"]),
                "ca": self.ca.pem,
                "coordinator": coordinator,
                "kit": self.kit,
            } | self.reply_overrides

        @app.post("/site/heartbeat")
        def receive_heartbeat(payload: dict[str, Any]) -> Any:
            self.heartbeats.append(payload)
            time = (datetime.now(UTC) + self.clock_offset).isoformat()
            return {"offers": self.offers, "runs": self.runs, "time": time}

        @app.get("/site/runs/{run}/models/{name:path}")
        def send_model(run: str, name: str) -> Response:
            self.downloads.append((run, name))
            return Response(self.models[run, name], media_type="application/octet-stream")

        @app.post("/site/leave")
        def leave() -> dict[str, bool]:
            self.has_left = True
            return {"ok": True}

        return app
