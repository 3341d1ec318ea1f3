"""A coordinator with people, sites and a way to speak to it without a network."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from fastapi import FastAPI

from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.service.web.app import create_app
from privacy.ledger import keys

STUDY = """
name = "moons"
about = "A small study."
rounds = 4
model = "moons_net"
[data]
name = "moons"
points = 200
"""
RSA = generate_private_key(public_exponent=65537, key_size=2048)  # slow to make: once


@dataclass
class Clock:
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        return self.now

    def pass_by(self, **much: float) -> None:
        self.now += timedelta(**much)


@dataclass
class Web:
    """One caller: a token, or cookies like a browser's."""

    app: FastAPI
    token: str = ""
    cookies: dict[str, str] = field(default_factory=dict)

    def __call__(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=("10.1.1.1", 5000))
            async with httpx.AsyncClient(transport=transport, base_url="https://co", cookies=self.cookies) as client:
                headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
                kind = {} if body is None else {"json": body}
                return await client.request(method, path, headers=headers | more.pop("headers", {}), **kind, **more)

        return asyncio.run(go())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self("POST", path, body, **more)


@dataclass
class World:
    home: CoordinatorHome
    store: CoordinatorStore
    app: FastAPI
    clock: Clock
    lead_token: str

    @property
    def lead(self) -> Web:
        return Web(self.app, self.lead_token)

    @property
    def nobody(self) -> Web:
        return Web(self.app)

    def person(self, role: Any) -> Web:
        token = self.store.accounts.add_user(f"a-{role}", role, "test")
        assert token is not None
        return Web(self.app, token)

    def enrol(self, site: str, key: Ed25519PrivateKey | None = None) -> Web:
        told = self.nobody.post(
            "/site/enrol", enrolment(self.store.accounts.create_invitation(site, 1, "lead")[0], site, key)
        )
        assert told.status_code == 200, told.text
        return Web(self.app, told.json()["credential"])

    def offer(self, **more: Any) -> str:
        made = self.lead.post("/api/runs", {"study": STUDY} | more)
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    def approval(self, run: str, hours: float = 24) -> dict[str, Any]:
        row = self.store.find_run(run)
        assert row is not None
        until = (self.clock() + timedelta(hours=hours)).isoformat()
        return {"run": run, "offer": row.digest, "at": self.clock().isoformat(), "expires": until, "officer": "1a2b"}

    def state(self, run: str) -> str:
        row = self.store.find_run(run)
        assert row is not None
        return row.state

    def file(self, run: str, name: str, data: bytes = b"x") -> Path:
        path = self.home.runs_folder / run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path


def beating(*approvals: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": "0.1.0", "status": {}, "approvals": list(approvals)} | more


def csr(name: str, key: RSAPrivateKey = RSA) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return made.public_bytes(Encoding.PEM).decode()


def enrolment(token: str, site: str, key: Ed25519PrivateKey | None = None, **more: str) -> dict[str, str]:
    key = key or keys.generate_key()
    asked = more.pop("csr", csr(site))
    sha = [hashlib.sha256(text.encode()).hexdigest() for text in (token, asked)]
    proof = keys.sign(key, "possession", {"site": site, "token_sha256": sha[0], "csr_sha256": sha[1]})
    own = {"token": token, "site": site, "key": keys.public_hex(key), "officer": keys.public_hex(keys.generate_key())}
    return own | {"csr": asked, "version": "0.1.0", "proof": proof} | more


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys take a second to make."""
    return CoordinatorHome.create(tmp_path_factory.mktemp("built") / "home", "Test Trust", "localhost", 8443).path


@pytest.fixture
def world(built: Path, tmp_path: Path):
    import shutil

    shutil.copytree(built, tmp_path / "home")
    home, clock = CoordinatorHome.open(tmp_path / "home"), Clock()
    store = CoordinatorStore(home.database_url, clock)
    app = create_app(home, store, registered_sites=lambda: {"a"})
    yield World(home, store, app, clock, home.token_path.read_text().strip())
    store.close()
