"""A site, its officer and a coordinator with their keys, and ledgers and records of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import LedgerError
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.ledger import Ledger
from privacy.ledger.receipts import ReceiptRequest, check_receipt, create_receipt_request
from privacy.ledger.records import (
    ApprovalRevoked,
    ChargeRefused,
    DatasetSnapshot,
    LedgerBudget,
    LedgerOpened,
    LedgerReceipt,
    LedgerRecord,
    PrivacyCharge,
    StudyApproved,
    StudyCommitment,
    UnitWithdrawn,
    pseudonymize_unit,
)
from privacy.ledger.signatures import officer_key_rotation
from privacy.ledger.verify import verify_ledger

SITE, DATASET_ID = "st-anne", "smears-2019-2024"
STUDY_HASH = "5f" * 32
DATASET = DatasetSnapshot(fingerprint="sha256:9c0d", num_units=812, num_examples=20140)


def make_clock(step: timedelta = timedelta(hours=5)) -> Callable[[], datetime]:
    """A clock that advances by `step` at each call."""
    now = [datetime(2025, 1, 7, 9, 30, tzinfo=UTC)]

    def read() -> datetime:
        now[0] += step
        return now[0]

    return read


@dataclass
class LedgerParties:
    """The folder of a site's ledger and the keys of agent, officer and coordinator."""

    folder: Path
    agent: Ed25519PrivateKey = field(default_factory=generate_key)
    officer: Ed25519PrivateKey = field(default_factory=generate_key)
    coordinator: Ed25519PrivateKey = field(default_factory=generate_key)
    clock: Callable[[], datetime] = field(default_factory=make_clock)

    @property
    def path(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def countersigner(self) -> LedgerCountersigner:
        return LedgerCountersigner(self.folder / "coordinator", self.coordinator)

    def make_opening(self, **fields) -> LedgerOpened:
        defaults = {
            "site": SITE,
            "dataset_id": DATASET_ID,
            "privacy_unit": "patient",
            "budget": LedgerBudget(epsilon=8.0, delta=1e-5),
            "agent_key": public_hex(self.agent),
            "officer_key": public_hex(self.officer),
        }
        return LedgerOpened(**(defaults | fields))

    def create_ledger(self, **fields) -> Ledger:
        return Ledger.create(self.path, self.make_opening(**fields), self.agent, self.officer, self.clock)

    def open_ledger(self) -> Ledger:
        return Ledger.open(self.path, self.agent, self.clock)

    def make_request(
        self, ledger: Ledger, key: Ed25519PrivateKey | None = None, since_index: int | None = None
    ) -> ReceiptRequest:
        return create_receipt_request(ledger, key or self.agent, public_hex(self.coordinator), since_index)

    def append_receipt(self, ledger: Ledger) -> LedgerReceipt:
        """Requests, checks and appends a receipt for the head."""
        receipt = self.countersigner.countersign(self.make_request(ledger))
        check_receipt(receipt, ledger, public_hex(self.coordinator))
        ledger.append(receipt)
        return receipt

    def charge_round(self, ledger: Ledger, round_number: int, epsilon: float, study: str = "anaemia") -> LedgerReceipt:
        ledger.append(make_charge(round_number, epsilon, study))
        return self.append_receipt(ledger)


def assert_refused(
    ledger: Ledger, record: LedgerRecord, officer: Ed25519PrivateKey | object | None = None, match: str = ""
) -> None:
    """The record is refused with this message, and the file does not change."""
    before = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=match):
        ledger.append(record, officer)
    assert ledger.path.read_bytes() == before
    assert verify_ledger(ledger.path).is_valid


def make_charge(round_number: int, epsilon: float, study: str = "anaemia", **fields) -> PrivacyCharge:
    defaults = {
        "study": study,
        "study_hash": STUDY_HASH,
        "round": round_number,
        "attempt": 0,
        "job_index": 0,
        "mechanism": "poisson-gaussian",
        "noise_multiplier": 1.1,
        "sampling_rate": 0.01,
        "steps": 50,
        "privacy_unit": "patient",
        "total_epsilon": epsilon,
        "delta": 1e-5,
        "accountant": "pld",
    }
    return PrivacyCharge(**(defaults | fields))


def make_commitment(**fields) -> StudyCommitment:
    defaults = {
        "study": "anaemia",
        "study_hash": STUDY_HASH,
        "mechanism": "poisson-gaussian",
        "noise_multiplier": 1.1,
        "sampling_rate": 0.01,
        "steps_per_round": 50,
        "max_participations": 40,
        "max_grad_norm": 1.0,
        "privacy_unit": "patient",
        "delta": 1e-5,
        "epsilon": 3.7,
    }
    return StudyCommitment(**(defaults | fields))


def create_long_ledger(parties: LedgerParties) -> LedgerReceipt:
    """31 entries of all kinds except `carried_charges` and `cosigner_policy`; the last is a receipt, which is returned."""
    ledger = parties.create_ledger()
    ledger.append(DATASET)
    terms = {"until": "2025-12-31", "sites": [SITE, "Zürich"], "most": 3.7}
    ledger.append(StudyApproved(study_hash=STUDY_HASH, terms=terms), parties.officer)
    ledger.append(make_commitment())
    for round_number in range(4):
        parties.charge_round(ledger, round_number, 0.4 + 0.3 * round_number)
    pseudonym = pseudonymize_unit(b"only the site has this", "patient 4711")
    ledger.append(UnitWithdrawn(unit_pseudonym=pseudonym, reason="withdrew"), parties.officer)
    ledger.append(DatasetSnapshot(fingerprint="sha256:77ab", num_units=811, num_examples=20113))
    parties.agent = generate_key()
    ledger.rotate_agent_key(parties.agent)
    for round_number in range(4, 6):
        parties.charge_round(ledger, round_number, 0.4 + 0.3 * round_number)
    ledger.append(LedgerBudget(epsilon=2.0, delta=1e-5), parties.officer)
    ledger.append(ChargeRefused(study="anaemia", round=6, reason="epsilon 2.2 of 2"))
    new_officer = generate_key()
    ledger.append(officer_key_rotation(ledger.state.keys, new_officer), parties.officer)
    parties.officer = new_officer
    ledger.append(ApprovalRevoked(study_hash=STUDY_HASH), parties.officer)
    ledger.revoke_agent_key(parties.officer, last_trusted_index=ledger.last_index, reason="a laptop was stolen")
    parties.agent = generate_key()
    ledger.rotate_agent_key(parties.agent, parties.officer)
    ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), parties.officer)
    ledger.append(make_commitment(study="malaria", study_hash="e1" * 32))
    parties.charge_round(ledger, 0, 2.25, "malaria")
    return parties.charge_round(ledger, 1, 2.5, "malaria")
