"""The trust store: public keys, pinned by hand, of the signers whose bundles this machine accepts."""

from __future__ import annotations

import json
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_config_path

from pipeline.core.errors import KeyFileError
from pipeline.core.files import write_atomically
from privacy.ledger.keys import fingerprint

PUBLIC_KEY_HEX = re.compile(r"[0-9a-f]{64}")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,79}")


@dataclass(frozen=True)
class TrustStore:
    path: Path

    @classmethod
    def open_default(cls) -> TrustStore:
        """HEMOFED_TRUST, or the user's own file."""
        override = os.environ.get("HEMOFED_TRUST")
        return cls(Path(override) if override else user_config_path("hemofed") / "trust.json")

    def load_keys(self) -> dict[str, str]:
        """Name -> public key."""
        try:
            table = json.loads(self.path.read_text("utf-8"))
            if not isinstance(table, dict) or not all(PUBLIC_KEY_HEX.fullmatch(str(key)) for key in table.values()):
                raise ValueError("it does not map names to keys")
            return {str(name): str(key) for name, key in table.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, UnicodeDecodeError) as error:
            raise KeyFileError(f"{self.path} is damaged ({error}); move it away and pin the keys again") from error

    def find_name(self, key: str) -> str | None:
        return next((name for name, known in self.load_keys().items() if known == key), None)

    def add(self, name: str, key: str) -> None:
        pinned = self.load_keys()
        if not KEY_NAME.fullmatch(name):
            raise KeyFileError(f"{name!r} is not a valid name for a key; use letters, digits, spaces and . _ @ -")
        if pinned.get(name, key) != key:
            raise KeyFileError(
                f"{name} is pinned with another key, {fingerprint(bytes.fromhex(pinned[name]))}; "
                f"to replace it, first: hemofed trust remove '{name}'"
            )
        self._save(pinned | {name: key})

    def remove(self, name: str) -> None:
        pinned = self.load_keys()
        if name not in pinned:
            raise KeyFileError(f"no key is pinned as {name!r}; pinned keys: {', '.join(pinned) or 'none'}")
        self._save({n: k for n, k in pinned.items() if n != name})

    def _save(self, pinned: dict[str, str]) -> None:
        write_atomically(self.path, (json.dumps(pinned, indent=1) + "\n").encode())


def read_public_key(source: str) -> str:
    """A public key from 64 hex digits, from a file that begins with them, or from a bundle that it signed."""
    text, path = source.strip().lower(), Path(source)
    if PUBLIC_KEY_HEX.fullmatch(text):
        return text
    if path.is_dir() or zipfile.is_zipfile(path):
        from deploy.bundle.bundle import read_signer_key

        return read_signer_key(path)
    if not path.is_file():
        raise KeyFileError(f"{source} is neither a public key nor a file or bundle that holds one; give 64 hex digits")
    with path.open("rb") as file:
        text = file.read(64).decode("ascii", "replace").lower()
    if not PUBLIC_KEY_HEX.fullmatch(text):
        raise KeyFileError(f"{source} does not begin with a public key (64 hex digits)")
    return text
