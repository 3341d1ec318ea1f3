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

from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically
from privacy.ledger import keys
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerBudget, LedgerOpened, UnitWithdrawn, pseudonymize_unit


@dataclass
class SiteHome:
    path: Path
    agent_key: Ed25519PrivateKey
    ledger: Ledger

    @classmethod
    def create(
        cls,
        path: Path,
        site: str,
        dataset_id: str,
        privacy_unit: str,
        budget: LedgerBudget,
        officer_key: Ed25519PrivateKey | None = None,
    ) -> SiteHome:
        """`officer`: the officer's key; one is made, and kept here, if not given."""
        if (path / "ledger.jsonl").exists():
            raise RunFolderError(f"{path} is a site's home already; a budget belongs to its data set for good")
        path.mkdir(parents=True, exist_ok=True)
        agent_key = keys.generate_key()
        keys.save_key(agent_key, path / "agent.pem")
        if officer_key is None:
            officer_key = keys.generate_key()
            keys.save_key(officer_key, path / "officer.pem")
        salt_fd = os.open(path / "salt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(salt_fd, "wb") as file:
            file.write(os.urandom(32))
        opening = LedgerOpened(
            site=site,
            dataset_id=dataset_id,
            privacy_unit=privacy_unit,
            budget=budget,
            agent_key=keys.public_hex(agent_key),
            officer_key=keys.public_hex(officer_key),
        )
        return cls(path, agent_key, Ledger.create(path / "ledger.jsonl", opening, agent_key, officer_key))

    @classmethod
    def open(cls, path: Path) -> SiteHome:
        if not (path / "ledger.jsonl").is_file():
            raise RunFolderError(f"{path} is no site's home: it has no ledger.jsonl; make one with `hemofed site init`")
        agent_key = keys.load_key(path / "agent.pem")
        return cls(path, agent_key, Ledger.open(path / "ledger.jsonl", agent_key))

    @property
    def salt(self) -> bytes:
        return (self.path / "salt").read_bytes()

    @property
    def withdrawn_units(self) -> frozenset[str]:
        """By the ledger, and by a list of the home's own, which outlives a ledger that is continued in a new one."""
        listed_units = json.loads(self._withdrawn_file.read_text("utf-8")) if self._withdrawn_file.exists() else []
        return frozenset(
            [
                *listed_units,
                *(
                    e.record.unit_pseudonym
                    for e in self.ledger.entries("forget")
                    if isinstance(e.record, UnitWithdrawn)
                ),
            ]
        )

    def withdraw_unit(self, unit_id: str, reason: str = "") -> bool:
        """Whether that is news."""
        unit_pseudonym = pseudonymize_unit(self.salt, unit_id)
        if unit_pseudonym in self.withdrawn_units:
            return False
        self.ledger.append(UnitWithdrawn(unit_pseudonym=unit_pseudonym, reason=reason))
        write_atomically(self._withdrawn_file, json.dumps(sorted(self.withdrawn_units)).encode())
        return True

    @property
    def _withdrawn_file(self) -> Path:
        return self.path / "forgotten.json"

    def retained_mask(self, unit_names: Sequence[str]) -> list[bool]:
        """Which of these units did not withdraw."""
        withdrawn, salt = self.withdrawn_units, self.salt
        return [not withdrawn or pseudonymize_unit(salt, name) not in withdrawn for name in unit_names]

    @property
    def outbox_file(self) -> Path:
        return self.path / "outbox" / "update.safetensors"

    def last_unmasked_round(self, study: str) -> int:
        """The last turn of the study whose secure sum this site helped to unmask; -1 if none."""
        file = self.path / "unmasked.json"
        record = json.loads(file.read_text("utf-8")) if file.exists() else {}
        return int(record["turn"]) if record.get("study") == study else -1

    def record_unmasked_round(self, study: str, round_number: int) -> None:
        write_atomically(self.path / "unmasked.json", json.dumps({"study": study, "turn": round_number}).encode())
