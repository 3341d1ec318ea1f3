"""Whose bundles this machine believes: public keys that somebody pinned by hand."""

from __future__ import annotations

import json
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_config_path

from pipeline.core.errors import BadKey
from pipeline.core.files import write_atomically
from privacy.ledger.keys import fingerprint

HEX = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,79}")


@dataclass(frozen=True)
class Trust:
    path: Path

    @classmethod
    def here(cls) -> Trust:
        """HEMOFED_TRUST, or the user's own file."""
        named = os.environ.get("HEMOFED_TRUST")
        return cls(Path(named) if named else user_config_path("hemofed") / "trust.json")

    def keys(self) -> dict[str, str]:
        """Name -> public key."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            if not isinstance(found, dict) or not all(HEX.fullmatch(str(key)) for key in found.values()):
                raise ValueError("it is no table of names and keys")
            return {str(name): str(key) for name, key in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, UnicodeDecodeError) as error:
            raise BadKey(f"{self.path} is damaged ({error}); move it away and pin keys anew") from error

    def name_of(self, key: str) -> str | None:
        return next((name for name, known in self.keys().items() if known == key), None)

    def add(self, name: str, key: str) -> None:
        known = self.keys()
        if not NAME.fullmatch(name):
            raise BadKey(f"{name!r} is no name for a key; use letters, digits, spaces and . _ @ -")
        if known.get(name, key) != key:
            raise BadKey(
                f"{name} is pinned with the key {fingerprint(bytes.fromhex(known[name]))}; "
                f"if it has a new one, first: hemofed trust remove '{name}'"
            )
        self._write(known | {name: key})

    def remove(self, name: str) -> None:
        known = self.keys()
        if name not in known:
            raise BadKey(f"no key is pinned as {name!r}; pinned: {', '.join(known) or 'none'}")
        self._write({n: k for n, k in known.items() if n != name})

    def _write(self, known: dict[str, str]) -> None:
        write_atomically(self.path, (json.dumps(known, indent=1) + "\n").encode())


def read_key(given: str) -> str:
    """64 hex digits, a file that begins with them, or a bundle that the key has signed."""
    text, path = given.strip().lower(), Path(given)
    if HEX.fullmatch(text):
        return text
    if path.is_dir() or zipfile.is_zipfile(path):
        from deploy.bundle.bundle import signer_of

        return signer_of(path)
    if not path.is_file():
        raise BadKey(f"{given} is neither a public key (64 hex digits) nor a file or bundle that holds one")
    with path.open("rb") as file:
        text = file.read(64).decode("ascii", "replace").lower()
    if not HEX.fullmatch(text):
        raise BadKey(f"{given} does not begin with a public key (64 hex digits)")
    return text
