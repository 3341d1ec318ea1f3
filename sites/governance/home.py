"""A site's own folder: its key, its ledger, whom it must forget, and the last noised answer that it gave.

HOME/agent.pem       the agent's private key, readable by nobody else
HOME/officer.pem     the officer's, in a simulation only; a real officer keeps it elsewhere
HOME/ledger.jsonl    what was spent on the data set, signed and chained (privacy/ledger/ledger.py)
HOME/salt            makes pseudonyms of withdrawn patients
HOME/outbox/         the last answer, to be sent again instead of being made, and charged, again
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import BadRun
from pipeline.core.files import write_atomically
from privacy.ledger import keys
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import Budget, Forget, Open, pseudonym


@dataclass
class Home:
    path: Path
    key: Ed25519PrivateKey
    ledger: Ledger

    @classmethod
    def create(
        cls, path: Path, site: str, dataset_id: str, unit: str, budget: Budget, officer: Ed25519PrivateKey | None = None
    ) -> Home:
        """`officer`: the officer's key; one is made, and kept here, if not given."""
        if (path / "ledger.jsonl").exists():
            raise BadRun(f"{path} is a site's home already; a budget belongs to its data set for good")
        path.mkdir(parents=True, exist_ok=True)
        key = keys.generate()
        keys.save(key, path / "agent.pem")
        if officer is None:
            officer = keys.generate()
            keys.save(officer, path / "officer.pem")
        salt = os.open(path / "salt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(salt, "wb") as file:
            file.write(os.urandom(32))
        opening = Open(
            site=site,
            dataset_id=dataset_id,
            unit=unit,
            budget=budget,
            agent=keys.public_hex(key),
            officer=keys.public_hex(officer),
        )
        return cls(path, key, Ledger.create(path / "ledger.jsonl", opening, key, officer))

    @classmethod
    def open(cls, path: Path) -> Home:
        if not (path / "ledger.jsonl").is_file():
            raise BadRun(f"{path} is no site's home: it has no ledger.jsonl; make one with `hemofed site init`")
        key = keys.load(path / "agent.pem")
        return cls(path, key, Ledger.open(path / "ledger.jsonl", key))

    @property
    def salt(self) -> bytes:
        return (self.path / "salt").read_bytes()

    @property
    def forgotten(self) -> frozenset[str]:
        """By the ledger, and by a list of the home's own, which outlives a ledger that is continued in a new one."""
        listed = json.loads(self._list.read_text("utf-8")) if self._list.exists() else []
        return frozenset([*listed, *(e.what.unit for e in self.ledger.entries("forget") if isinstance(e.what, Forget))])

    def forget(self, unit: str, reason: str = "") -> bool:
        """Whether that is news."""
        name = pseudonym(self.salt, unit)
        if name in self.forgotten:
            return False
        self.ledger.append(Forget(unit=name, reason=reason))
        write_atomically(self._list, json.dumps(sorted(self.forgotten)).encode())
        return True

    @property
    def _list(self) -> Path:
        return self.path / "forgotten.json"

    def remaining(self, names: Sequence[str]) -> list[bool]:
        """Which of these units did not withdraw."""
        gone, salt = self.forgotten, self.salt
        return [not gone or pseudonym(salt, name) not in gone for name in names]

    @property
    def outbox(self) -> Path:
        return self.path / "outbox" / "update.safetensors"

    def unmasked(self, study: str) -> int:
        """The last turn of the study whose secure sum this site helped to unmask; -1 if none."""
        file = self.path / "unmasked.json"
        last = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return int(last["turn"]) if last.get("study") == study else -1

    def note_unmasked(self, study: str, turn: int) -> None:
        write_atomically(self.path / "unmasked.json", json.dumps({"study": study, "turn": turn}).encode())
