"""What a secure sum signs, derives and encrypts, each bound to its purpose, attempt, sender and receiver.

An advert is 64 bytes of signature and three times 32: the public keys for parcels and for masks, and a commitment to the
seed of the site's own mask. The commitment and the mask both come from HKDF on 32 random bytes, so knowing one says
nothing of the other. A parcel is a nonce, two encrypted shares and a tag.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from privacy.secure_aggregation.shamir import PRIME, SHARE

PROTOCOL = "hemofed secure sum 1"
SIGNATURE, KEY, NONCE, TAG = 64, 32, 12, 16
PARCEL = NONCE + 2 * SHARE + TAG


class Broken(Exception):
    """Bytes that are not what they have to be. Caught where it is known whose they are."""


@dataclass(frozen=True)
class Advert:
    for_parcels: bytes  # X25519 public keys
    for_masks: bytes
    commitment: bytes

    def signed(self, key: Ed25519PrivateKey, name: str, context: bytes) -> bytes:
        return signed(key, self.for_parcels + self.for_masks + self.commitment, "advert", context, name)

    @classmethod
    def read(cls, data: bytes, public: bytes, name: str, context: bytes) -> Advert:
        payload = verified(data, public, "advert", context, name)
        if len(payload) != 3 * KEY:
            raise Broken(f"an advert of {len(payload)} bytes instead of {3 * KEY}")
        advert = cls(payload[:KEY], payload[KEY : 2 * KEY], payload[2 * KEY :])
        for theirs in (advert.for_parcels, advert.for_masks):
            agreed(_PROBE, theirs)
        return advert


def bound(*parts: str | bytes) -> bytes:
    """With lengths in front: no two lists of parts give the same bytes."""
    raw = [part.encode() if isinstance(part, str) else part for part in (PROTOCOL, *parts)]
    return b"".join(len(part).to_bytes(8) + part for part in raw)


def derived(secret: bytes, *purpose: str | bytes) -> bytes:
    return HKDF(SHA256(), KEY, salt=None, info=bound(*purpose)).derive(secret)


def signed(key: Ed25519PrivateKey, payload: bytes, *purpose: str | bytes) -> bytes:
    return key.sign(bound(*purpose, payload)) + payload


def verified(data: bytes, public: bytes, *purpose: str | bytes) -> bytes:
    """The payload."""
    payload = data[SIGNATURE:]
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(data[:SIGNATURE], bound(*purpose, payload))
    except (InvalidSignature, ValueError) as error:
        raise Broken(f"no signature of this site for this attempt under {purpose[0]!r}") from error
    return payload


def agreed(mine: X25519PrivateKey, theirs: bytes) -> bytes:
    try:
        return mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:  # a point of low order gives zeros to everybody
        raise Broken("a public key that no honest site makes") from error


_PROBE = X25519PrivateKey.generate()


def commitment(seed: bytes, name: str, context: bytes) -> bytes:
    return derived(seed, "commitment", context, name)


def view_of(adverts: Mapping[str, bytes], context: bytes) -> bytes:
    """Who takes part, with which keys. Sites that were told of different ones agree on no key."""
    return hashlib.sha256(bound("view", context, *(part for item in sorted(adverts.items()) for part in item))).digest()


def pair_seed(mine: X25519PrivateKey, theirs: bytes, view: bytes, one: str, other: str) -> bytes:
    return derived(agreed(mine, theirs), "pair", view, *sorted((one, other)))


@dataclass(frozen=True)
class Route:
    """From one site to another; a key of its own for each, used once."""

    view: bytes
    sender: str
    receiver: str

    def seal(self, mine: X25519PrivateKey, theirs: bytes, shares: tuple[int, int]) -> bytes:
        nonce = os.urandom(NONCE)
        return nonce + self._cipher(mine, theirs).encrypt(nonce, b"".join(map(packed, shares)), self._label)

    def open(self, mine: X25519PrivateKey, theirs: bytes, parcel: bytes) -> tuple[int, int]:
        try:
            if len(parcel) != PARCEL:
                raise Broken(f"a parcel of {len(parcel)} bytes instead of {PARCEL}")
            plain = self._cipher(mine, theirs).decrypt(parcel[:NONCE], parcel[NONCE:], self._label)
        except InvalidTag as error:
            raise Broken("a parcel that was changed, or is of another site or attempt") from error
        return unpacked(plain[:SHARE]), unpacked(plain[SHARE:])

    @property
    def _label(self) -> bytes:
        return bound("parcel", self.view, self.sender, self.receiver)

    def _cipher(self, mine: X25519PrivateKey, theirs: bytes) -> AESGCM:
        return AESGCM(derived(agreed(mine, theirs), "parcel", self.view, self.sender, self.receiver))


def packed(share: int) -> bytes:
    return share.to_bytes(SHARE)


def unpacked(data: bytes) -> int:
    share = int.from_bytes(data)
    if share >= PRIME:
        raise Broken("a share beyond the prime")
    return share
