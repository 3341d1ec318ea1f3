"""Signatures, derived keys and encryption of secure aggregation, bound to purpose, attempt, sender and receiver.

A key advertisement is a signature of 64 bytes and three times 32 bytes: the public keys for encryption and for masks,
and a commitment to the seed of the site's own mask. Commitment and mask are both derived by HKDF from 32 random bytes,
so one reveals nothing about the other. Encrypted shares are a nonce, two encrypted shares and a tag.
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

from privacy.secure_aggregation.shamir import PRIME, SHARE_BYTES

PROTOCOL_NAME = "hemofed secure sum 1"
SIGNATURE_BYTES, KEY_BYTES, NONCE_BYTES, TAG_BYTES = 64, 32, 12, 16
ENCRYPTED_SHARES_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES


class MalformedDataError(Exception):
    """Invalid bytes; the caller catches it and adds the sender's name."""


@dataclass(frozen=True)
class KeyAdvertisement:
    encryption_public_key: bytes  # X25519 public keys
    mask_public_key: bytes
    seed_commitment: bytes

    def to_signed_bytes(self, key: Ed25519PrivateKey, name: str, context: bytes) -> bytes:
        return sign_payload(
            key, self.encryption_public_key + self.mask_public_key + self.seed_commitment, "advert", context, name
        )

    @classmethod
    def from_signed_bytes(cls, data: bytes, verify_key: bytes, name: str, context: bytes) -> KeyAdvertisement:
        payload = verify_payload(data, verify_key, "advert", context, name)
        if len(payload) != 3 * KEY_BYTES:
            raise MalformedDataError(f"an advertisement of {len(payload)} bytes instead of {3 * KEY_BYTES}")
        advertisement = cls(payload[:KEY_BYTES], payload[KEY_BYTES : 2 * KEY_BYTES], payload[2 * KEY_BYTES :])
        for public_key in (advertisement.encryption_public_key, advertisement.mask_public_key):
            exchange_keys(_PROBE_KEY, public_key)
        return advertisement


def encode_parts(*parts: str | bytes) -> bytes:
    """Length-prefixed parts, so that different lists of parts never give the same bytes."""
    encoded = [part.encode() if isinstance(part, str) else part for part in (PROTOCOL_NAME, *parts)]
    return b"".join(len(part).to_bytes(8) + part for part in encoded)


def derive_key(secret: bytes, *purpose: str | bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=encode_parts(*purpose)).derive(secret)


def sign_payload(signing_key: Ed25519PrivateKey, payload: bytes, *purpose: str | bytes) -> bytes:
    return signing_key.sign(encode_parts(*purpose, payload)) + payload


def verify_payload(data: bytes, verify_key: bytes, *purpose: str | bytes) -> bytes:
    """The payload of signed data; raises MalformedDataError if the signature is not valid."""
    payload = data[SIGNATURE_BYTES:]
    try:
        Ed25519PublicKey.from_public_bytes(verify_key).verify(data[:SIGNATURE_BYTES], encode_parts(*purpose, payload))
    except (InvalidSignature, ValueError) as error:
        raise MalformedDataError(f"no valid signature of this site for this attempt and {purpose[0]!r}") from error
    return payload


def exchange_keys(private_key: X25519PrivateKey, public_key: bytes) -> bytes:
    try:
        return private_key.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError as error:  # a point of low order, with which every key exchange gives zeros
        raise MalformedDataError("a public key that no honest site makes") from error


_PROBE_KEY = X25519PrivateKey.generate()


def commit_to_seed(seed: bytes, name: str, context: bytes) -> bytes:
    return derive_key(seed, "commitment", context, name)


def compute_roster_view(advertisements: Mapping[str, bytes], context: bytes) -> bytes:
    """Hash of all advertisements. Sites that received different ones derive different keys."""
    return hashlib.sha256(
        encode_parts("view", context, *(part for item in sorted(advertisements.items()) for part in item))
    ).digest()


def derive_pair_seed(
    private_key: X25519PrivateKey, public_key: bytes, roster_view: bytes, first_site: str, second_site: str
) -> bytes:
    return derive_key(exchange_keys(private_key, public_key), "pair", roster_view, *sorted((first_site, second_site)))


@dataclass(frozen=True)
class ShareRoute:
    """Encryption of shares from one site to another, with a separate key that is used once."""

    roster_view: bytes
    sender: str
    receiver: str

    def encrypt_shares(self, private_key: X25519PrivateKey, public_key: bytes, shares: tuple[int, int]) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher(private_key, public_key).encrypt(
            nonce, b"".join(map(encode_share, shares)), self._associated_data
        )

    def decrypt_shares(
        self, private_key: X25519PrivateKey, public_key: bytes, encrypted_shares: bytes
    ) -> tuple[int, int]:
        try:
            if len(encrypted_shares) != ENCRYPTED_SHARES_BYTES:
                raise MalformedDataError(
                    f"encrypted shares of {len(encrypted_shares)} bytes instead of {ENCRYPTED_SHARES_BYTES}"
                )
            plaintext = self._cipher(private_key, public_key).decrypt(
                encrypted_shares[:NONCE_BYTES], encrypted_shares[NONCE_BYTES:], self._associated_data
            )
        except InvalidTag as error:
            raise MalformedDataError("encrypted shares that were changed, or are of another site or attempt") from error
        return decode_share(plaintext[:SHARE_BYTES]), decode_share(plaintext[SHARE_BYTES:])

    @property
    def _associated_data(self) -> bytes:
        return encode_parts("parcel", self.roster_view, self.sender, self.receiver)

    def _cipher(self, private_key: X25519PrivateKey, public_key: bytes) -> AESGCM:
        return AESGCM(
            derive_key(exchange_keys(private_key, public_key), "parcel", self.roster_view, self.sender, self.receiver)
        )


def encode_share(share: int) -> bytes:
    return share.to_bytes(SHARE_BYTES)


def decode_share(data: bytes) -> int:
    share = int.from_bytes(data)
    if share >= PRIME:
        raise MalformedDataError("a share above the prime")
    return share
