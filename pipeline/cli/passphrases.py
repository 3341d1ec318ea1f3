"""Private keys and passphrases, typed at the terminal: never taken from arguments, and never shown."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import KeyFileError
from privacy.ledger import keys

PASSPHRASE_VARIABLE = "HEMOFED_PASSPHRASE"  # for unattended backups


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Asks for the passphrase if the key file is encrypted."""
    is_encrypted = path.is_file() and b"ENCRYPTED" in path.read_bytes().partition(b"\n")[0]
    return keys.load_key(path, _prompt_secret(f"passphrase of {path}: ") if is_encrypted else None)


def read_passphrase(subject: str, confirm: bool) -> str:
    """From HEMOFED_PASSPHRASE, or typed; typed twice if `confirm`. `subject`: what it protects, for the prompt."""
    if value := os.environ.get(PASSPHRASE_VARIABLE):
        return value
    typed = _prompt_secret(f"passphrase of {subject}: ")
    if not typed:
        raise KeyFileError(f"the passphrase is empty and protects nothing; type one, or set {PASSPHRASE_VARIABLE}")
    if confirm and typed != _prompt_secret("repeat the passphrase: "):
        raise KeyFileError("the two passphrases differ; run the command again")
    return typed


def _prompt_secret(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError as error:
        raise KeyFileError("the passphrase cannot be typed here; run this command in a terminal") from error
