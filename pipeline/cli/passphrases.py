"""Keys and passphrases that people bring along: asked for at the terminal, never taken from arguments or shown."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import KeyFileError
from privacy.ledger import keys

PASSPHRASE_VARIABLE = "HEMOFED_PASSPHRASE"  # of a backup, for machines that make them at night


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """A private key; its passphrase is asked for if it has one."""
    is_encrypted = path.is_file() and b"ENCRYPTED" in path.read_bytes().partition(b"\n")[0]
    return keys.load_key(path, _prompt_secret(f"passphrase of {path}: ") if is_encrypted else None)


def read_passphrase(subject: str, confirm: bool) -> str:
    """From the environment, or typed in; twice if it is `new`."""
    if value := os.environ.get(PASSPHRASE_VARIABLE):
        return value
    typed = _prompt_secret(f"passphrase of {subject}: ")
    if not typed:
        raise KeyFileError(f"an empty passphrase protects nothing; type one in, or set {PASSPHRASE_VARIABLE}")
    if confirm and typed != _prompt_secret("once more: "):
        raise KeyFileError("that was typed in differently the second time; begin again")
    return typed


def _prompt_secret(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError as error:
        raise KeyFileError("nobody is there to type in the passphrase; run this at a terminal") from error
