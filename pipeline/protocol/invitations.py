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

from pipeline.core.errors import BadKey

FORM = "hemofed1"
SHOWN = 32  # hex digits
PATTERN = re.compile(rf"^{FORM}\.([A-Za-z0-9_-]{{16,200}})\.([0-9a-f]{{{SHOWN}}})$")
BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True)
class Invitation:
    token: str = field(repr=False)
    fingerprint: str


def invitation(token: str, ca_pem: str) -> str:
    return f"{FORM}.{token}.{ca_fingerprint(ca_pem)}"


def parse_invitation(text: str) -> Invitation:
    found = PATTERN.fullmatch(text.strip())
    if found is None:  # not shown: it may be a secret with a slip in it
        raise BadKey(
            f"this is no invitation; it looks like {FORM}.TOKEN.FINGERPRINT: copy the whole line from the lead"
        )
    return Invitation(found[1], found[2])


def ca_fingerprint(pem: str) -> str:
    return hashlib.sha256(_der(pem)).hexdigest()[:SHOWN]


def one_certificate(pem: str) -> str:
    """The same certificate without anything around it: what else stood in the text would be believed, too."""
    return ssl.DER_cert_to_PEM_cert(_der(pem))


def _der(pem: str) -> bytes:
    before, begin, rest = pem.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end or before.strip() or after.strip():
        raise BadKey("this is not one certificate in PEM; the coordinator's HOME/ca.pem is wanted")
    try:
        return base64.b64decode("".join(inside.split()), validate=True)
    except ValueError as error:
        raise BadKey("the certificate's PEM is damaged; the coordinator's HOME/ca.pem is wanted") from error
