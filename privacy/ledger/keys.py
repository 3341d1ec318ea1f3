"""Ed25519 keys (RFC 8032): generated, stored in files that only their owner can read, and used over canonical JSON.

Each signature covers its purpose, so the signature of a receipt is never valid for a ledger entry. Canonical JSON has
sorted keys, no spaces, UTF-8, floats as Python writes them, and no NaN, so each value has exactly one byte string.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from pipeline.core.errors import KeyFileError
from pipeline.core.files import raise_no_space

Purpose = Literal["entry", "decision", "possession", "receipt", "request", "bundle"]
FINGERPRINT_DIGITS = 32  # hex digits of a fingerprint: 128 bits
DIGITS_PER_GROUP = 4
OTHERS_ACCESS_BITS = stat.S_IRWXG | stat.S_IRWXO


def generate_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def public_hex(key: Ed25519PrivateKey) -> str:
    """64 hex digits, as in ledgers, receipts and requests."""
    return public_bytes(key).hex()


def fingerprint(public_key: bytes) -> str:
    """The first 128 bits of the key's SHA-256 as 1a2b-3c4d-..., for comparison by telephone."""
    digits = hashlib.sha256(public_key).hexdigest()[:FINGERPRINT_DIGITS]
    return "-".join(
        digits[start : start + DIGITS_PER_GROUP] for start in range(0, FINGERPRINT_DIGITS, DIGITS_PER_GROUP)
    )


def save_key(key: Ed25519PrivateKey, path: Path, passphrase: str | None = None) -> Path:
    """Writes PEM (PKCS8) with mode 0600; never overwrites a file, because a lost key cannot be recovered."""
    encryption: KeySerializationEncryption = (
        BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise KeyFileError(
            f"{path} exists and is not overwritten; move it away, or save the key under a new name"
        ) from error
    try:
        with raise_no_space(path), os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise
    return path


def load_key(path: Path, passphrase: str | None = None) -> Ed25519PrivateKey:
    pem = _read_private_pem(path)
    is_encrypted = b"ENCRYPTED" in pem.partition(b"\n")[0]
    if is_encrypted and not passphrase:
        raise KeyFileError(f"{path} is protected by a passphrase, and none was given")
    if passphrase and not is_encrypted:
        raise KeyFileError(
            f"{path} is not protected by a passphrase; leave the passphrase out, or protect the key first"
        )
    try:
        key = load_pem_private_key(pem, passphrase.encode() if passphrase else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        cause = "the passphrase is wrong, or the file is damaged" if is_encrypted else "it is damaged, or not a PEM key"
        raise KeyFileError(f"{path} cannot be read: {cause}; try again, or restore it from its backup") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path} holds a key of another type; ledgers are signed with Ed25519")
    return key


def _read_private_pem(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & OTHERS_ACCESS_BITS:
                raise KeyFileError(
                    f"{path} is a private key that other users can access (mode {mode:04o}): chmod 600 {path}"
                )
            return file.read()
    except FileNotFoundError as error:
        raise KeyFileError(f"there is no key at {path}; make one, or name the right file") from error
    except OSError as error:
        raise KeyFileError(
            f"{path} cannot be read: {error.strerror}; only the user who owns a private key can read it"
        ) from error


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sign(key: Ed25519PrivateKey, purpose: Purpose, value: Any) -> str:
    """The signature as 128 hex digits."""
    return key.sign(_signing_input(purpose, value)).hex()


def is_valid_signature(public_key: str, purpose: Purpose, value: Any, signature: str) -> bool:
    """`public_key` and `signature` in lower-case hex; anything else is not valid."""
    return _is_valid_signature(public_key, _signing_input(purpose, value), signature)


@lru_cache(4096)  # a ledger is checked when opened, exported and audited, and each check of a signature takes 0.1 ms
def _is_valid_signature(public_key: str, signed_bytes: bytes, signature: str) -> bool:
    try:
        key_bytes, signature_bytes = bytes.fromhex(public_key), bytes.fromhex(signature)
        if (key_bytes.hex(), signature_bytes.hex()) != (public_key, signature):
            return False
        Ed25519PublicKey.from_public_bytes(key_bytes).verify(signature_bytes, signed_bytes)
    except (InvalidSignature, ValueError):
        return False
    return True


def _signing_input(purpose: Purpose, value: Any) -> bytes:
    return f"hemofed/1/{purpose}\n".encode() + canonical_json(value)
