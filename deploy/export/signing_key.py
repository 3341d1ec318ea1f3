"""The user's own key, which signs bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from platformdirs import user_data_path

from privacy.ledger import keys


def load_signing_key(path: Path | None, on_created: Callable[[Path], None] = lambda path: None) -> Ed25519PrivateKey:
    """Without a path: the user's own key, which is created at first use."""
    if path is not None:
        return keys.load_key(path)
    default_path = user_data_path("hemofed") / "signing.pem"
    if not default_path.exists():
        keys.save_key(keys.generate_key(), default_path)
        on_created(default_path)
    return keys.load_key(default_path)
