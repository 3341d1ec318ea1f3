"""Enrolment of a site at a coordinator: HOME/membership.json and HOME/kit, written together or not at all.

All private keys are generated at the site and stay there: the agent's key (HOME/agent.pem) signs the proof of possession,
and the key of the client certificate (HOME/kit/startup/client.key) signs the certificate request. Before it sends
anything, the site checks the coordinator's certificate authority against the fingerprint in the invitation.
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

from pipeline.core.errors import KeyFileError, MessageError, RunFolderError
from pipeline.core.files import raise_no_space
from pipeline.protocol.invitations import FORMAT_PREFIX, ca_fingerprint, normalize_certificate, parse_invitation
from pipeline.study.offer import HexDigest32, SiteName
from privacy.ledger import keys
from sites.agent.http import call_with_retries, open_http_client, request_bytes, request_json
from sites.governance.home import SiteHome

MEMBERSHIP_FILE, KIT_FOLDER = "membership.json", "kit"
KEY_FILE, CERTIFICATE_FILE, ROOT_CA_FILE = "startup/client.key", "startup/client.crt", "startup/rootCA.pem"


class StrictWireModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class CoordinatorInfo(StrictWireModel):
    name: str = Field(max_length=200)
    key: HexDigest32
    host: str = Field(max_length=253)
    port: int = Field(gt=0, lt=65536)


class SiteMembership(StrictWireModel):
    url: str
    site: SiteName
    credential: str = Field(repr=False)
    ca: str  # PEM
    coordinator: CoordinatorInfo

    @classmethod
    def load(cls, home: Path) -> SiteMembership:
        if not has_membership(home):
            raise RunFolderError(f"{home} belongs to no coordinator; join one with `hemofed site join`")
        try:
            return cls.model_validate_json((home / MEMBERSHIP_FILE).read_bytes())
        except ValidationError as error:
            raise RunFolderError(
                f"{home / MEMBERSHIP_FILE} is damaged; restore it from a backup, or leave and join again"
            ) from error


class EnrolmentReply(StrictWireModel):
    """The coordinator's answer."""

    credential: str = Field(min_length=8, max_length=1000, pattern=r"^[!-~]+$")
    certificate: str = Field(max_length=20_000)
    ca: str = Field(max_length=20_000)
    coordinator: CoordinatorInfo


def has_membership(home: Path) -> bool:
    return (home / MEMBERSHIP_FILE).is_file()


def enrol_site(
    home: SiteHome, url: str, site: str, token: str, expected_fingerprint: str | None = None
) -> SiteMembership:
    """`token`: the full invitation, or its token alone together with `expected_fingerprint` of the authority."""
    if has_membership(home.path):
        raise RunFolderError(f"{home.path} already belongs to a coordinator; leave it first with `hemofed site leave`")
    if site != (own_name := home.ledger.state.opening.site):
        raise RunFolderError(
            f"{home.path} is the home of {own_name}, not of {site}; the ledger fixes the name of a site"
        )
    if token.startswith(f"{FORMAT_PREFIX}.") or expected_fingerprint is None:
        invitation = parse_invitation(token)
        token, expected_fingerprint = invitation.token, invitation.fingerprint
    ca_pem = _fetch_ca(url, expected_fingerprint)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    reply = _request_enrolment(home, url, site, token, key, ca_pem)
    if normalize_certificate(reply.ca) != ca_pem:
        raise KeyFileError(f"{url} sent another certificate authority than the one of the connection; ask the lead")
    _check_certificate(reply.certificate, ca_pem, key, site)
    membership = SiteMembership(
        url=url, site=site, credential=reply.credential, ca=ca_pem, coordinator=reply.coordinator
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()
    _save_membership(
        home.path, membership, {ROOT_CA_FILE: ca_pem, CERTIFICATE_FILE: reply.certificate, KEY_FILE: key_pem}
    )
    return membership


def delete_membership(home: Path) -> None:
    """Deletes the membership first: without it, nothing uses the kit."""
    (home / MEMBERSHIP_FILE).unlink(missing_ok=True)
    shutil.rmtree(home / KIT_FOLDER, ignore_errors=True)


def _fetch_ca(url: str, expected_fingerprint: str) -> str:
    with open_http_client(url, None) as client:
        reply_bytes = call_with_retries(lambda: request_bytes(client, "GET", "/ca.pem", max_bytes=20_000))
    ca_pem = normalize_certificate(reply_bytes.decode("ascii", "replace"))
    if ca_fingerprint(ca_pem) != expected_fingerprint:
        raise KeyFileError(
            f"{url} is not the coordinator of this invitation: its authority has the fingerprint {ca_fingerprint(ca_pem)}, the "
            f"invitation has {expected_fingerprint}. Nothing was sent to it. Check the address, and ask the lead"
        )
    return ca_pem


def _request_enrolment(
    home: SiteHome, url: str, site: str, token: str, key: rsa.RSAPrivateKey, ca_pem: str
) -> EnrolmentReply:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, site)])
    signing_request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    csr = signing_request.public_bytes(Encoding.PEM).decode()
    proof_statement = {"site": site, "token_sha256": _sha256(token), "csr_sha256": _sha256(csr)}
    payload = {
        "token": token,
        "site": site,
        "key": keys.public_hex(home.agent_key),
        "officer": home.ledger.state.keys.officer_key,
        "csr": csr,
        "version": version("hemofed"),
        "proof": keys.sign(home.agent_key, "possession", proof_statement),
    }
    with open_http_client(url, ca_pem) as client:  # no retry: a token works once
        raw = request_json(client, "POST", "/site/enrol", payload)
    try:
        return EnrolmentReply.model_validate(raw)
    except ValidationError as error:
        bad_fields = ", ".join(sorted({".".join(map(str, e["loc"])) for e in error.errors()}))
        raise MessageError(
            f"{url}: the enrolment reply has invalid fields, maybe from another version: {bad_fields}"
        ) from error


def _check_certificate(pem: str, ca_pem: str, key: rsa.RSAPrivateKey, site: str) -> None:
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem.encode()))
    except (ValueError, TypeError, InvalidSignature) as error:
        raise KeyFileError("the client certificate is damaged, or not from the federation's authority") from error
    names = [str(part.value) for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if certificate.public_key() != key.public_key() or names != [site]:
        raise KeyFileError(
            f"the client certificate is for {', '.join(names) or 'no name'} or another key, not for {site}"
        )


def _save_membership(home: Path, membership: SiteMembership, kit_files: Mapping[str, str]) -> None:
    """Writes the kit into a staging folder and moves it. FLARE's settings follow in sites/agent/flare_client.py."""
    staging = Path(tempfile.mkdtemp(dir=home, prefix=f".{KIT_FOLDER}."))  # mode 0700
    try:
        with raise_no_space(staging):
            for path, text in kit_files.items():
                (staging / path).parent.mkdir(mode=0o700, exist_ok=True)
                write_private_file(staging / path, text.encode())
        shutil.rmtree(home / KIT_FOLDER, ignore_errors=True)
        with _rollback_on_error(home):
            staging.replace(home / KIT_FOLDER)
            write_private_file(home / MEMBERSHIP_FILE, membership.model_dump_json(indent=1).encode())
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _rollback_on_error(home: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        delete_membership(home)
        raise


def write_private_file(path: Path, data: bytes) -> Path:
    """Like files.write_atomically, with mode 600 from the first byte on."""
    with raise_no_space(path):
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


def membership_summary(membership: SiteMembership) -> dict[str, Any]:
    """The fields without secrets."""
    return {
        "site": membership.site,
        "coordinator": membership.coordinator.name,
        "url": membership.url,
        "coordinator_key": keys.fingerprint(bytes.fromhex(membership.coordinator.key)),
    }
