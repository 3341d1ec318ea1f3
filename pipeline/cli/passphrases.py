"""Keys and passphrases that people bring along: asked for at the terminal, never taken from arguments or shown."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import BadKey
from privacy.ledger import keys

VARIABLE = "HEMOFED_PASSPHRASE"  # of a backup, for machines that make them at night


def unlocked(path: Path) -> Ed25519PrivateKey:
    """A private key; its passphrase is asked for if it has one."""
    protected = path.is_file() and b"ENCRYPTED" in path.read_bytes().partition(b"\n")[0]
    return keys.load(path, _asked(f"passphrase of {path}: ") if protected else None)


def passphrase(of: str, new: bool) -> str:
    """From the environment, or typed in; twice if it is `new`."""
    if given := os.environ.get(VARIABLE):
        return given
    typed = _asked(f"passphrase of {of}: ")
    if not typed:
        raise BadKey(f"an empty passphrase protects nothing; type one in, or set {VARIABLE}")
    if new and typed != _asked("once more: "):
        raise BadKey("that was typed in differently the second time; begin again")
    return typed


def _asked(prompt: str) -> str:
    try:
        return getpass.getpass(prompt)
    except EOFError as error:
        raise BadKey("nobody is there to type in the passphrase; run this at a terminal") from error
