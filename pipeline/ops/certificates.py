"""A federation's own certificate authority; RSA-2048, as FLARE's handshake needs it.

A site's certificate is valid for clients only and names no host, so that no site can impersonate the coordinator.
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

from pipeline.core.errors import KeyFileError
from pipeline.core.files import write_atomically

RSA_KEY_BITS = 2048
CLOCK_SKEW = timedelta(days=1)  # a site's clock may be behind
CA_YEARS, CERTIFICATE_YEARS = 10, 2
ORGANIZATION_NAME = "hemofed"
MAX_COMMON_NAME_CHARS = 64  # X.520
# FLARE reads an administrator's role from this attribute
ROLE_ATTRIBUTE = NameOID.UNSTRUCTURED_NAME


@dataclass(frozen=True)
class IssuedCertificate:
    certificate_pem: str
    key_pem: str


@dataclass(frozen=True)
class CertificateAuthority:
    certificate: x509.Certificate
    key: RSAPrivateKey

    @classmethod
    def create(cls, folder: Path, name: str) -> CertificateAuthority:
        key = _generate_key()
        subject = _x509_name(name)
        usage = _key_usage(digital_signature=True, key_cert_sign=True, crl_sign=True)
        certificate = (
            _certificate_builder(subject, subject, key.public_key(), key, CA_YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        write_private_file(folder / "ca.key", _private_key_pem(key))
        write_atomically(folder / "ca.pem", certificate.public_bytes(Encoding.PEM))
        return cls(certificate, key)

    @classmethod
    def open(cls, folder: Path) -> CertificateAuthority:
        try:
            key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise KeyFileError(
                f"{folder}: ca.pem or ca.key cannot be read ({error}); restore them from a backup"
            ) from error
        if not isinstance(key, RSAPrivateKey) or key.public_key() != certificate.public_key():
            raise KeyFileError(f"{folder}: ca.key does not belong to ca.pem; restore both from the same backup")
        return cls(certificate, key)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def is_current(self, certificate: str) -> bool:
        """Whether this authority issued the certificate and it is valid for another 30 days."""
        try:
            parsed = x509.load_pem_x509_certificate(certificate.encode())
            parsed.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return parsed.not_valid_after_utc > datetime.now(UTC) + timedelta(days=30)

    def issue_server(self, hosts: Sequence[str], name: str | None = None) -> IssuedCertificate:
        """A server certificate for all hosts. `name`: common name by which FLARE's clients know the server."""
        purposes = (
            ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        )  # FLARE's server connects to itself
        alternative_names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
        key = _generate_key()
        return IssuedCertificate(
            self._sign_certificate(_x509_name(name or hosts[0]), key.public_key(), purposes, alternative_names),
            _private_key_pem(key).decode(),
        )

    def issue_client(self, name: str, role: str | None = None) -> IssuedCertificate:
        """A client certificate; with `role`, of a FLARE administrator."""
        key = _generate_key()
        purposes = (ExtendedKeyUsageOID.CLIENT_AUTH,)
        return IssuedCertificate(
            self._sign_certificate(_x509_name(name, role), key.public_key(), purposes), _private_key_pem(key).decode()
        )

    def sign_request(self, csr: str, name: str) -> str:
        """Signs the public key of a certificate request; takes nothing else from the request."""
        try:
            request = x509.load_pem_x509_csr(csr.encode())
            public_key, is_proven = request.public_key(), request.is_signature_valid
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KeyFileError(
                "the certificate request is not PKCS#10 in PEM; make it with `hemofed site join`"
            ) from error
        if not is_proven:
            raise KeyFileError("the certificate request is not signed by its own key; make it with `hemofed site join`")
        if not isinstance(public_key, RSAPublicKey) or public_key.key_size < RSA_KEY_BITS:
            raise KeyFileError(f"the certificate request must be for an RSA key of at least {RSA_KEY_BITS} bits")
        common_names = [str(a.value) for a in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if common_names != [name]:
            raise KeyFileError(
                f"the certificate request is for {', '.join(common_names) or 'no name'}, but {name} enrols"
            )
        return self._sign_certificate(_x509_name(name), public_key, (ExtendedKeyUsageOID.CLIENT_AUTH,))

    def _sign_certificate(
        self,
        subject: x509.Name,
        public_key: RSAPublicKey,
        purposes: Sequence[x509.ObjectIdentifier],
        alternative_names: x509.SubjectAlternativeName | None = None,
    ) -> str:
        builder = (
            _certificate_builder(subject, self.certificate.subject, public_key, self.key, CERTIFICATE_YEARS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(digital_signature=True, key_encipherment=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        )
        if alternative_names is not None:
            builder = builder.add_extension(alternative_names, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def write_private_file(path: Path, data: bytes) -> Path:
    """Creates a file with mode 0600; never overwrites one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, public_key: RSAPublicKey, issuer_key: RSAPrivateKey, years: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=365 * years))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _x509_name(common_name: str, role: str | None = None) -> x509.Name:
    attributes = [
        (NameOID.COMMON_NAME, common_name[:MAX_COMMON_NAME_CHARS]),
        (NameOID.ORGANIZATION_NAME, ORGANIZATION_NAME),
    ]
    return x509.Name(
        [x509.NameAttribute(*attribute) for attribute in attributes + ([(ROLE_ATTRIBUTE, role)] if role else [])]
    )


def _key_usage(**enabled: bool) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: enabled.get(name, False) for name in names})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _generate_key() -> RSAPrivateKey:
    return generate_private_key(public_exponent=65537, key_size=RSA_KEY_BITS)


def _private_key_pem(key: RSAPrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
