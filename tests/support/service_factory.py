"""A coordinator service with users and sites, called through ASGI without a network."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from fastapi import FastAPI

from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from privacy.ledger import keys

STUDY_TOML = """
name = "moons"
description = "A small study."
rounds = 4
model = "moons_net"
[data]
name = "moons"
points = 200
"""


@dataclass
class FakeClock:
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **duration: float) -> None:
        self.now += timedelta(**duration)


@dataclass
class ApiCaller:
    """One caller of the API: with a token, or with cookies like a browser."""

    app: FastAPI
    token: str = ""
    cookies: dict[str, str] = field(default_factory=dict)

    def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=("10.1.1.1", 5000))
            async with httpx.AsyncClient(transport=transport, base_url="https://co", cookies=self.cookies) as client:
                headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
                content = {} if body is None else {"json": body}
                all_headers = headers | options.pop("headers", {})
                return await client.request(method, path, headers=all_headers, **content, **options)

        return asyncio.run(send())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self("POST", path, body, **options)


@dataclass
class CoordinatorService:
    home: CoordinatorHome
    store: CoordinatorStore
    app: FastAPI
    clock: FakeClock
    lead_token: str

    @property
    def lead(self) -> ApiCaller:
        return ApiCaller(self.app, self.lead_token)

    @property
    def anonymous(self) -> ApiCaller:
        return ApiCaller(self.app)

    def add_user(self, role: Any) -> ApiCaller:
        token = self.store.accounts.add_user(f"a-{role}", role, "test")
        assert token is not None
        return ApiCaller(self.app, token)

    def enrol_site(self, site: str, key: Ed25519PrivateKey | None = None) -> ApiCaller:
        invitation, _ = self.store.accounts.create_invitation(site, 1, "lead")
        response = self.anonymous.post("/site/enrol", make_enrolment(invitation, site, key))
        assert response.status_code == 200, response.text
        return ApiCaller(self.app, response.json()["credential"])

    def offer_run(self, **fields: Any) -> str:
        response = self.lead.post("/api/runs", {"study": STUDY_TOML} | fields)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    def make_approval(self, run: str, hours: float = 24) -> dict[str, Any]:
        row = self.store.find_run(run)
        assert row is not None
        expires = (self.clock() + timedelta(hours=hours)).isoformat()
        return {"run": run, "offer": row.digest, "at": self.clock().isoformat(), "expires": expires, "officer": "1a2b"}

    def run_state(self, run: str) -> str:
        row = self.store.find_run(run)
        assert row is not None
        return row.state

    def write_run_file(self, run: str, name: str, data: bytes = b"x") -> Path:
        path = self.home.runs_folder / run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path


def make_heartbeat(*approvals: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"version": "0.1.0", "status": {}, "approvals": list(approvals)} | fields


@cache
def shared_rsa_key() -> RSAPrivateKey:
    """Made once: it takes long."""
    return generate_private_key(public_exponent=65537, key_size=2048)


def make_csr(name: str, key: RSAPrivateKey | None = None) -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return builder.sign(key or shared_rsa_key(), hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def make_enrolment(token: str, site: str, key: Ed25519PrivateKey | None = None, **fields: str) -> dict[str, str]:
    key = key or keys.generate_key()
    csr = fields.pop("csr", make_csr(site))
    token_sha256, csr_sha256 = (hashlib.sha256(text.encode()).hexdigest() for text in (token, csr))
    proof = keys.sign(key, "possession", {"site": site, "token_sha256": token_sha256, "csr_sha256": csr_sha256})
    own = {"token": token, "site": site, "key": keys.public_hex(key), "officer": keys.public_hex(keys.generate_key())}
    return own | {"csr": csr, "version": "0.1.0", "proof": proof} | fields
