"""What a study lead hands to a hospital: a one-time token, and how to know the coordinator when it is first met.

    hemofed1.TOKEN.FINGERPRINT
The fingerprint is of the certificate authority's certificate: 128 bits of the SHA-256 of its DER. Without it the first
connection would have to believe whoever answers.
"""

from __future__ import annotations

import base64
import hashlib
import re
import ssl
from dataclasses import dataclass, field

from pipeline.core.errors import KeyFileError

FORMAT_PREFIX = "hemofed1"
FINGERPRINT_HEX_DIGITS = 32  # hex digits
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
    if matched is None:  # not shown: it may be a secret with a slip in it
        raise KeyFileError(
            f"this is no invitation; it looks like {FORMAT_PREFIX}.TOKEN.FINGERPRINT: copy the whole line from the lead"
        )
    return Invitation(matched[1], matched[2])


def ca_fingerprint(pem: str) -> str:
    return hashlib.sha256(_decode_pem(pem)).hexdigest()[:FINGERPRINT_HEX_DIGITS]


def normalize_certificate(pem: str) -> str:
    """The same certificate without anything around it: what else stood in the text would be believed, too."""
    return ssl.DER_cert_to_PEM_cert(_decode_pem(pem))


def _decode_pem(pem: str) -> bytes:
    before, begin, rest = pem.partition(PEM_BEGIN)
    body, end, after = rest.partition(PEM_END)
    if not begin or not end or before.strip() or after.strip():
        raise KeyFileError("this is not one certificate in PEM; the coordinator's HOME/ca.pem is wanted")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except ValueError as error:
        raise KeyFileError("the certificate's PEM is damaged; the coordinator's HOME/ca.pem is wanted") from error
