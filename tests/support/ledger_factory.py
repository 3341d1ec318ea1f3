"""A hospital, its officer and a coordinator, and the ledger of a year between them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.ledger import Ledger
from privacy.ledger.receipts import check_receipt, create_receipt_request
from privacy.ledger.records import (
    ApprovalRevoked,
    ChargeRefused,
    DatasetSnapshot,
    LedgerBudget,
    LedgerOpened,
    LedgerReceipt,
    PrivacyCharge,
    StudyApproved,
    StudyCommitment,
    UnitWithdrawn,
    pseudonymize_unit,
)
from privacy.ledger.signatures import officer_key_rotation


def ticking(step: timedelta = timedelta(hours=5)) -> Callable[[], datetime]:
    """A clock that goes on by `step` whenever it is read."""
    now = [datetime(2025, 1, 7, 9, 30, tzinfo=UTC)]

    def read() -> datetime:
        now[0] += step
        return now[0]

    return read


@dataclass
class World:
    folder: Path
    agent: Ed25519PrivateKey = field(default_factory=generate_key)
    officer: Ed25519PrivateKey = field(default_factory=generate_key)
    coordinator: Ed25519PrivateKey = field(default_factory=generate_key)
    clock: Callable[[], datetime] = field(default_factory=ticking)

    @property
    def path(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def desk(self) -> LedgerCountersigner:
        return LedgerCountersigner(self.folder / "coordinator", self.coordinator)

    def opening(self, **more) -> LedgerOpened:
        usual = {
            "site": "st-anne",
            "dataset_id": "smears-2019-2024",
            "unit": "patient",
            "budget": LedgerBudget(epsilon=8.0, delta=1e-5),
            "agent": public_hex(self.agent),
            "officer": public_hex(self.officer),
        }
        return LedgerOpened(**(usual | more))

    def create(self, **more) -> Ledger:
        return Ledger.create(self.path, self.opening(**more), self.agent, self.officer, self.clock)

    def reopen(self, key: Ed25519PrivateKey | None = None) -> Ledger:
        return Ledger.open(self.path, key or self.agent, self.clock)

    def receipt(self, ledger: Ledger) -> LedgerReceipt:
        """Asked for, checked and appended."""
        receipt = self.desk.countersign(create_receipt_request(ledger, self.agent, public_hex(self.coordinator)))
        check_receipt(receipt, ledger, public_hex(self.coordinator))
        ledger.append(receipt)
        return receipt

    def train(self, ledger: Ledger, turn: int, epsilon: float, study: str = "anaemia") -> LedgerReceipt:
        ledger.append(charge(turn, epsilon, study))
        return self.receipt(ledger)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A real file system of 100 kB."""
    place = folder / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path, room: int = 0) -> None:
    """Leaves `room` bytes, in whole pages."""
    (place / "filling").write_bytes(bytes(shutil.disk_usage(place).free - room))


def charge(turn: int, epsilon: float, study: str = "anaemia", **more) -> PrivacyCharge:
    usual = {
        "study": study,
        "plan": "5f" * 32,
        "turn": turn,
        "attempt": 0,
        "nth": 0,
        "mechanism": "poisson-gaussian",
        "noise": 1.1,
        "rate": 0.01,
        "steps": 50,
        "unit": "patient",
        "epsilon": epsilon,
        "delta": 1e-5,
        "accountant": "pld",
    }
    return PrivacyCharge(**(usual | more))


def commit(**more) -> StudyCommitment:
    usual = {
        "study": "anaemia",
        "plan": "5f" * 32,
        "mechanism": "poisson-gaussian",
        "noise": 1.1,
        "rate": 0.01,
        "steps_per_turn": 50,
        "turns": 40,
        "clip": 1.0,
        "unit": "patient",
        "delta": 1e-5,
        "epsilon": 3.7,
    }
    return StudyCommitment(**(usual | more))


def a_year(world: World) -> LedgerReceipt:
    """32 entries of every kind but `carried`, the last one a receipt, which is returned."""
    ledger = world.create()
    ledger.append(DatasetSnapshot(fingerprint="sha256:9c0d", num_units=812, num_examples=20140))
    ledger.append(
        StudyApproved(study_hash="5f" * 32, terms={"until": "2025-12-31", "sites": ["st-anne", "Zürich"], "most": 3.7}),
        world.officer,
    )
    ledger.append(commit())
    for turn in range(4):
        world.train(ledger, turn, 0.4 + 0.3 * turn)
    ledger.append(
        UnitWithdrawn(unit_pseudonym=pseudonymize_unit(b"only the site has this", "patient 4711"), reason="withdrew"),
        world.officer,
    )
    ledger.append(DatasetSnapshot(fingerprint="sha256:77ab", num_units=811, num_examples=20113))
    world.agent, old = generate_key(), world.agent
    ledger.rotate_agent_key(world.agent)
    assert old is not world.agent
    for turn in range(4, 6):
        world.train(ledger, turn, 0.4 + 0.3 * turn)
    ledger.append(LedgerBudget(epsilon=2.0, delta=1e-5), world.officer)
    ledger.append(ChargeRefused(study="anaemia", round=6, reason="epsilon 2.2 of 2"))
    new = generate_key()
    ledger.append(officer_key_rotation(ledger.state.keys, new), world.officer)
    world.officer = new
    ledger.append(ApprovalRevoked(study_hash="5f" * 32), world.officer)
    ledger.revoke_agent_key(world.officer, last_trusted_index=ledger.last_index, reason="a laptop was stolen")
    world.agent = generate_key()
    ledger.rotate_agent_key(world.agent, world.officer)
    ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), world.officer)
    ledger.append(commit(study="malaria", plan="e1" * 32))
    world.train(ledger, 0, 2.25, "malaria")
    return world.train(ledger, 1, 2.5, "malaria")
