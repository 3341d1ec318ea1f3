"""A site's home folder.

HOME/agent.pem              the agent's private key, readable by its owner only
HOME/officer.pem            the officer's private key, in simulations only; a real officer keeps it elsewhere
HOME/ledger.jsonl           the privacy budget spent on the data set, signed and chained (privacy/ledger/ledger.py)
HOME/salt                   for the pseudonyms of withdrawn patients
HOME/withdrawn_units.json   these pseudonyms; a copy of the ledger's, which outlives a ledger recovery
HOME/unmasked_rounds.json   for each study, the last round of secure aggregation that the site helped to unmask
HOME/outbox/                the last noised update: a repeated message gets it again, without another charge
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import RunFolderError
from privacy.ledger import keys
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerBudget, LedgerOpened, UnitWithdrawn, pseudonymize_unit
from sites.governance.unmasked_rounds import read_unmasked_rounds, write_unmasked_rounds
from sites.governance.withdrawn_units import read_withdrawn_units, write_withdrawn_units

OUTBOX_FOLDER = "outbox"


@dataclass
class SiteHome:
    """An opened home folder: the agent's key and the ledger."""

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
        """`officer_key` None: generates one and stores it in the home."""
        if (path / "ledger.jsonl").exists():
            raise RunFolderError(f"{path} is already a site's home; the budget of a data set cannot be reset")
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
            raise RunFolderError(
                f"{path} is not a site's home: it has no ledger.jsonl; create one with `hemofed site init`"
            )
        agent_key = keys.load_key(path / "agent.pem")
        return cls(path, agent_key, Ledger.open(path / "ledger.jsonl", agent_key))

    @property
    def salt(self) -> bytes:
        return (self.path / "salt").read_bytes()

    @property
    def withdrawn_units(self) -> frozenset[str]:
        """Pseudonyms from the ledger and from the home's list, which outlives a ledger recovery."""
        records = [entry.record for entry in self.ledger.entries(UnitWithdrawn.kind)]
        recorded = [record.unit_pseudonym for record in records if isinstance(record, UnitWithdrawn)]
        return read_withdrawn_units(self.path).union(recorded)

    def withdraw_unit(self, unit_id: str, reason: str = "") -> bool:
        """False if the unit was withdrawn before."""
        unit_pseudonym = pseudonymize_unit(self.salt, unit_id)
        if unit_pseudonym in self.withdrawn_units:
            return False
        self.ledger.append(UnitWithdrawn(unit_pseudonym=unit_pseudonym, reason=reason))
        write_withdrawn_units(self.path, self.withdrawn_units)
        return True

    def retained_mask(self, unit_names: Sequence[str]) -> list[bool]:
        """True for each unit that did not withdraw."""
        withdrawn, salt = self.withdrawn_units, self.salt
        return [not withdrawn or pseudonymize_unit(salt, name) not in withdrawn for name in unit_names]

    @property
    def outbox_file(self) -> Path:
        return self.path / OUTBOX_FOLDER / "update.safetensors"

    def last_unmasked_round(self, study: str) -> int:
        """The last round whose aggregate the site helped to unmask; -1 if none. `study`: its hash."""
        return read_unmasked_rounds(self.path).get(study, -1)

    def record_unmasked_round(self, study: str, round_number: int) -> None:
        write_unmasked_rounds(self.path, read_unmasked_rounds(self.path) | {study: round_number})
