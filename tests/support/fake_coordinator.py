"""A stage that plays the coordinator's part over real TLS: own certificates, a FastAPI service, and a CONNECT proxy."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
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


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


class Authority:
    def __init__(self, name: str = "stage") -> None:
        self.key = rsa.generate_private_key(65537, 2048)
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self.name, self.key.public_key(), ca=True)
        self.pem = self.certificate.public_bytes(Encoding.PEM).decode()

    def _sign(self, subject: x509.Name, public: Any, ca: bool, names: Any = None) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=9))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def client(self, csr: str) -> str:
        request = x509.load_pem_x509_csr(csr.encode())
        return self._sign(request.subject, request.public_key(), ca=False).public_bytes(Encoding.PEM).decode()

    def server(self, folder: Path) -> tuple[Path, Path]:
        """Certificate and key of localhost."""
        key = rsa.generate_private_key(65537, 2048)
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        certificate = self._sign(subject, key.public_key(), ca=False, names=names)
        (folder / "web.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
        (folder / "web.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return folder / "web.crt", folder / "web.key"


_made = cache(Authority)  # making RSA keys takes time


def authority(name: str = "stage") -> Authority:
    """One a session and name."""
    return _made(name)


@contextlib.contextmanager
def served(app: Any, folder: Path, port: int = 0, by: Authority | None = None) -> Iterator[int]:
    """The port on which uvicorn serves the app with TLS."""
    certificate, key = (by or authority()).server(folder)
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        log_level="error",
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


class Stage:
    """The contract's site half. What was heard and what is to be said are plain attributes."""

    def __init__(self, ca: Authority | None = None) -> None:
        self.ca = ca or authority()
        self.key = keys.generate_key()
        self.invited = {"secret-token": "north"}
        self.kit = {
            "startup/fed_client.json": "{}",
            "local/resources.json": '{"a": 1}',
            "startup/rootCA.pem": self.ca.pem,
        }
        self.answer: dict[str, Any] = {}  # laid over what enrol answers
        self.offers: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.models: dict[tuple[str, str], bytes] = {}
        self.beats: list[dict[str, Any]] = []
        self.fetched: list[tuple[str, str]] = []
        self.enrolments: list[dict[str, Any]] = []
        self.left = False
        self.fail: list[int] = []  # statuses of the next answers
        self.ahead = timedelta()
        self.credential = "the-credential"
        self.app = self._make()

    def _make(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def guard(request: Request, go_on: Any) -> Any:
            if self.fail:
                return JSONResponse({"error": "as the test wants"}, self.fail.pop(0))
            open_paths = ("/ca.pem", "/site/enrol")
            if (
                request.url.path not in open_paths
                and request.headers.get("authorization") != f"Bearer {self.credential}"
            ):
                return JSONResponse({"error": "who are you?"}, 401)
            return await go_on(request)

        @app.get("/ca.pem")
        def ca() -> Response:
            return Response(self.ca.pem, media_type="application/x-pem-file")

        @app.post("/site/enrol")
        def enrol(said: dict[str, Any]) -> Any:
            proof = {
                "site": said["site"],
                "token_sha256": hashlib.sha256(said["token"].encode()).hexdigest(),
                "csr_sha256": hashlib.sha256(said["csr"].encode()).hexdigest(),
            }
            if self.invited.get(said["token"]) != said["site"]:
                return JSONResponse({"error": "this invitation is unknown, used or expired"}, 403)
            if not keys.is_valid_signature(said["key"], "possession", proof, said["proof"]):
                return JSONResponse({"error": "the proof is wrong"}, 403)
            self.invited.pop(said["token"])
            self.enrolments.append(said)
            about = {"name": "stage", "key": keys.public_hex(self.key), "host": "localhost", "port": 1}
            return {
                "credential": self.credential,
                "certificate": self.ca.client(said["csr"]),
                "ca": self.ca.pem,
                "coordinator": about,
                "kit": self.kit,
            } | self.answer

        @app.post("/site/beat")
        def beat(said: dict[str, Any]) -> Any:
            self.beats.append(said)
            return {"offers": self.offers, "runs": self.runs, "time": (datetime.now(UTC) + self.ahead).isoformat()}

        @app.get("/site/runs/{run}/models/{name:path}")
        def model(run: str, name: str) -> Response:
            self.fetched.append((run, name))
            return Response(self.models[run, name], media_type="application/octet-stream")

        @app.post("/site/leave")
        def leave() -> dict[str, bool]:
            self.left = True
            return {"ok": True}

        return app
