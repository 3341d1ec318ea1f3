"""A federation's own certificate authority: RSA-2048, as FLARE's handshake wants it.

A site's certificate may be shown by a client only, and names no host: no site can pose as the coordinator.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pipeline.core.errors import BadKey
from pipeline.core.files import write_atomically

BITS = 2048
SKEW = timedelta(days=1)  # a site's clock may be behind
CA_YEARS, YEARS = 10, 2
ORGANISATION = "hemofed"
LONGEST_NAME = 64  # of a common name (X.520)
# roles of FLARE's administrators stand in this attribute
ROLE = NameOID.UNSTRUCTURED_NAME


@dataclass(frozen=True)
class Issued:
    certificate: str  # PEM
    key: str


@dataclass(frozen=True)
class Authority:
    certificate: x509.Certificate
    key: RSAPrivateKey

    @classmethod
    def create(cls, folder: Path, name: str) -> Authority:
        key = _fresh()
        subject = _name(name)
        usage = _usage(digital_signature=True, key_cert_sign=True, crl_sign=True)
        certificate = (
            _builder(subject, subject, key.public_key(), key, CA_YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        write_private(folder / "ca.key", _key_pem(key))
        write_atomically(folder / "ca.pem", certificate.public_bytes(Encoding.PEM))
        return cls(certificate, key)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        try:
            key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise BadKey(f"{folder}: ca.pem or ca.key cannot be read ({error}); restore them from a backup") from error
        if not isinstance(key, RSAPrivateKey) or key.public_key() != certificate.public_key():
            raise BadKey(f"{folder}: ca.key does not belong to ca.pem; restore both from the same backup")
        return cls(certificate, key)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def stands(self, certificate: str) -> bool:
        """Whether it is one of ours, and good for another month."""
        try:
            given = x509.load_pem_x509_certificate(certificate.encode())
            given.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return given.not_valid_after_utc > datetime.now(UTC) + timedelta(days=30)

    def issue_server(self, hosts: Sequence[str], name: str | None = None) -> Issued:
        """For all these hosts; `name`: its common name, by which FLARE's clients know their server."""
        both = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)  # FLARE's server calls itself
        alternatives = x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)])
        key = _fresh()
        return Issued(self._sign(_name(name or hosts[0]), key.public_key(), both, alternatives), _key_pem(key).decode())

    def issue_client(self, name: str, role: str | None = None) -> Issued:
        """With `role`, for an administrator of FLARE."""
        key = _fresh()
        client = (ExtendedKeyUsageOID.CLIENT_AUTH,)
        return Issued(self._sign(_name(name, role), key.public_key(), client), _key_pem(key).decode())

    def sign_request(self, csr: str, name: str) -> str:
        """Only the public key is taken from the request; the rest is for us to say."""
        try:
            request = x509.load_pem_x509_csr(csr.encode())
            key, proven = request.public_key(), request.is_signature_valid
        except (ValueError, UnsupportedAlgorithm) as error:
            raise BadKey("the certificate request is no PKCS#10 in PEM; let `hemofed site join` make it") from error
        if not proven:
            raise BadKey("the certificate request is not signed by its own key; let `hemofed site join` make it")
        if not isinstance(key, RSAPublicKey) or key.key_size < BITS:
            raise BadKey(f"the certificate request must be for an RSA key of at least {BITS} bits")
        asked = [str(a.value) for a in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if asked != [name]:
            raise BadKey(f"the certificate request is for {', '.join(asked) or 'nobody'}, and {name} enrols")
        return self._sign(_name(name), key, (ExtendedKeyUsageOID.CLIENT_AUTH,))

    def _sign(
        self,
        subject: x509.Name,
        key: RSAPublicKey,
        purposes: Sequence[x509.ObjectIdentifier],
        alternatives: x509.SubjectAlternativeName | None = None,
    ) -> str:
        builder = (
            _builder(subject, self.certificate.subject, key, self.key, YEARS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True, key_encipherment=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        )
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def write_private(path: Path, data: bytes) -> Path:
    """Readable by its owner alone from its first byte on; never over another file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: RSAPublicKey, by: RSAPrivateKey, years: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=365 * years))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
    )


def _name(common: str, role: str | None = None) -> x509.Name:
    parts = [(NameOID.COMMON_NAME, common[:LONGEST_NAME]), (NameOID.ORGANIZATION_NAME, ORGANISATION)]
    return x509.Name([x509.NameAttribute(*part) for part in parts + ([(ROLE, role)] if role else [])])


def _usage(**said: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: said.get(name, False) for name in names})


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _fresh() -> RSAPrivateKey:
    return generate_private_key(public_exponent=65537, key_size=BITS)


def _key_pem(key: RSAPrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
