"""Invitations: a one-time token for a hospital, and the fingerprint by which it recognizes the coordinator.

    hemofed1.TOKEN.FINGERPRINT
The fingerprint is the first 128 bits of the SHA-256 of the certificate authority's certificate (DER). Without it the
first connection could not authenticate the coordinator.
"""

from __future__ import annotations

import base64
import hashlib
import re
import ssl
from dataclasses import dataclass, field

from pipeline.core.errors import KeyFileError

FORMAT_PREFIX = "hemofed1"
FINGERPRINT_HEX_DIGITS = 32
INVITATION_PATTERN = re.compile(
    rf"^{FORMAT_PREFIX}\.([A-Za-z0-9_-]{{16,200}})\.([0-9a-f]{{{FINGERPRINT_HEX_DIGITS}}})$"
)
PEM_BEGIN, PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True)
class Invitation:
    token: str = field(repr=False)
    fingerprint: str


def format_invitation(token: str, ca_pem: str) -> str:
    return f"{FORMAT_PREFIX}.{token}.{ca_fingerprint(ca_pem)}"


def parse_invitation(text: str) -> Invitation:
    matched = INVITATION_PATTERN.fullmatch(text.strip())
    if matched is None:  # the text is not shown: it may be a mistyped secret
        raise KeyFileError(
            f"this is not an invitation; it looks like {FORMAT_PREFIX}.TOKEN.FINGERPRINT: copy the whole line from the lead"
        )
    return Invitation(matched[1], matched[2])


def ca_fingerprint(pem: str) -> str:
    return hashlib.sha256(_decode_pem(pem)).hexdigest()[:FINGERPRINT_HEX_DIGITS]


def normalize_certificate(pem: str) -> str:
    """The certificate alone: any other text in the file would be trusted, too."""
    return ssl.DER_cert_to_PEM_cert(_decode_pem(pem))


def _decode_pem(pem: str) -> bytes:
    before, begin, rest = pem.partition(PEM_BEGIN)
    body, end, after = rest.partition(PEM_END)
    if not begin or not end or before.strip() or after.strip():
        raise KeyFileError("this is not one certificate in PEM; give the coordinator's HOME/ca.pem")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except ValueError as error:
        raise KeyFileError("the certificate's PEM is damaged; give the coordinator's HOME/ca.pem") from error
