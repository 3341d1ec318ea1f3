"""How a site becomes a member of a federation: HOME/membership.json and HOME/kit, written together or not at all.

The keys are made here and stay here: the agent's own (HOME/agent.pem) proves who asks, and the one of the certificate
(HOME/kit/startup/client.key) is asked for by a request. The coordinator is known by the invitation's fingerprint before
it is told anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.core.errors import BadKey, BadMessage, BadRun
from pipeline.core.files import full_disk_is_named
from pipeline.protocol.invitations import FORM, ca_fingerprint, one_certificate, parse_invitation
from pipeline.study.offer import Hex32, SiteName
from privacy.ledger import keys
from sites.agent.http import ask, fetch, open_client, patiently
from sites.governance.home import Home

FILE, KIT = "membership.json", "kit"
KEY, CERTIFICATE, ROOT = "startup/client.key", "startup/client.crt", "startup/rootCA.pem"


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Coordinator(Strict):
    name: str = Field(max_length=200)
    key: Hex32
    host: str = Field(max_length=253)
    port: int = Field(gt=0, lt=65536)


class Membership(Strict):
    url: str
    site: SiteName
    credential: str = Field(repr=False)
    ca: str  # PEM
    coordinator: Coordinator

    @classmethod
    def load(cls, home: Path) -> Membership:
        if not joined(home):
            raise BadRun(f"{home} belongs to no coordinator; join one with `hemofed site join`")
        try:
            return cls.model_validate_json((home / FILE).read_bytes())
        except ValidationError as error:
            raise BadRun(f"{home / FILE} is damaged; restore it from a backup, or leave and join again") from error


class Enrolled(Strict):
    """The coordinator's answer."""

    credential: str = Field(min_length=8, max_length=1000, pattern=r"^[!-~]+$")
    certificate: str = Field(max_length=20_000)
    ca: str = Field(max_length=20_000)
    coordinator: Coordinator


def joined(home: Path) -> bool:
    return (home / FILE).is_file()


def enrol(home: Home, url: str, site: str, token: str, ca_fingerprint: str | None = None) -> Membership:
    """`token`: the whole invitation; or a bare token, and then the authority's fingerprint has to come with it."""
    if joined(home.path):
        raise BadRun(f"{home.path} belongs to a coordinator already; leave it first with `hemofed site leave`")
    if site != (own := home.ledger.standing.opening.site):
        raise BadRun(f"{home.path} is the home of {own}, not of {site}; a site has one name, in its ledger")
    if token.startswith(f"{FORM}.") or ca_fingerprint is None:
        invited = parse_invitation(token)
        token, ca_fingerprint = invited.token, invited.fingerprint
    ca = _authority(url, ca_fingerprint)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    answer = _asked(home, url, site, token, key, ca)
    if one_certificate(answer.ca) != ca:
        raise BadKey(f"{url} answers with another certificate authority than it was reached with; ask the lead")
    _check_certificate(answer.certificate, ca, key, site)
    member = Membership(url=url, site=site, credential=answer.credential, ca=ca, coordinator=answer.coordinator)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()
    _keep(home.path, member, {ROOT: ca, CERTIFICATE: answer.certificate, KEY: private})
    return member


def forget(home: Path) -> None:
    """The membership goes first: without it nothing uses the kit."""
    (home / FILE).unlink(missing_ok=True)
    shutil.rmtree(home / KIT, ignore_errors=True)


def _authority(url: str, fingerprint: str) -> str:
    with open_client(url, None) as client:
        found = patiently(lambda: fetch(client, "GET", "/ca.pem", limit=20_000))
    ca = one_certificate(found.decode("ascii", "replace"))
    if ca_fingerprint(ca) != fingerprint:
        raise BadKey(
            f"{url} is not the coordinator of this invitation: its authority has the fingerprint {ca_fingerprint(ca)}, the "
            f"invitation says {fingerprint}. Nothing was told to it. Check the address, and ask the lead"
        )
    return ca


def _asked(home: Home, url: str, site: str, token: str, key: rsa.RSAPrivateKey, ca: str) -> Enrolled:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, site)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    csr = request.public_bytes(Encoding.PEM).decode()
    proven = {"site": site, "token_sha256": _sha256(token), "csr_sha256": _sha256(csr)}
    said = {
        "token": token,
        "site": site,
        "key": keys.public_hex(home.key),
        "officer": home.ledger.standing.keys.officer,
        "csr": csr,
        "version": version("hemofed"),
        "proof": keys.sign(home.key, "possession", proven),
    }
    with open_client(url, ca) as client:  # once: a token is used up by its first use
        raw = ask(client, "POST", "/site/enrol", said)
    try:
        return Enrolled.model_validate(raw)
    except ValidationError as error:
        wrong = ", ".join(sorted({".".join(map(str, e["loc"])) for e in error.errors()}))
        raise BadMessage(f"{url} does not answer as a coordinator of this version does: {wrong}") from error


def _check_certificate(pem: str, ca: str, key: rsa.RSAPrivateKey, site: str) -> None:
    try:
        given = x509.load_pem_x509_certificate(pem.encode())
        given.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.encode()))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise BadKey("the certificate that came back is damaged, or not from the federation's authority") from error
    names = [str(part.value) for part in given.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if given.public_key() != key.public_key() or names != [site]:
        raise BadKey(
            f"the certificate that came back is for {', '.join(names) or 'nobody'} or another key, not for {site}"
        )


def _keep(home: Path, member: Membership, kit: Mapping[str, str]) -> None:
    """The kit is made beside its place and moved there whole. Its settings the site writes itself (sites/agent/flare_client.py)."""
    draft = Path(tempfile.mkdtemp(dir=home, prefix=f".{KIT}."))  # mode 0700
    try:
        with full_disk_is_named(draft):
            for path, text in kit.items():
                (draft / path).parent.mkdir(mode=0o700, exist_ok=True)
                write_private(draft / path, text.encode())
        shutil.rmtree(home / KIT, ignore_errors=True)
        with _undone(home):
            draft.replace(home / KIT)
            write_private(home / FILE, member.model_dump_json(indent=1).encode())
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _undone(home: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        forget(home)
        raise


def write_private(path: Path, data: bytes) -> Path:
    """As files.write_atomically, for its owner's eyes only from the first byte on."""
    with full_disk_is_named(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def about(member: Membership) -> dict[str, Any]:
    """What may be shown."""
    return {"site": member.site, "coordinator": member.coordinator.name, "url": member.url,
            "coordinator_key": keys.fingerprint(bytes.fromhex(member.coordinator.key))}  # fmt: skip
