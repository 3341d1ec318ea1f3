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

from privacy.ledger.countersigner import Countersigner
from privacy.ledger.keys import generate, public_hex
from privacy.ledger.ledger import Ledger
from privacy.ledger.receipts import check_receipt, request
from privacy.ledger.records import (
    Approve,
    Budget,
    Charge,
    Commit,
    Data,
    Forget,
    Open,
    Receipt,
    Refusal,
    Withdraw,
    pseudonym,
)
from privacy.ledger.signatures import new_officer


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
    agent: Ed25519PrivateKey = field(default_factory=generate)
    officer: Ed25519PrivateKey = field(default_factory=generate)
    coordinator: Ed25519PrivateKey = field(default_factory=generate)
    clock: Callable[[], datetime] = field(default_factory=ticking)

    @property
    def path(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def desk(self) -> Countersigner:
        return Countersigner(self.folder / "coordinator", self.coordinator)

    def opening(self, **more) -> Open:
        usual = {
            "site": "st-anne",
            "dataset_id": "smears-2019-2024",
            "unit": "patient",
            "budget": Budget(epsilon=8.0, delta=1e-5),
            "agent": public_hex(self.agent),
            "officer": public_hex(self.officer),
        }
        return Open(**(usual | more))

    def create(self, **more) -> Ledger:
        return Ledger.create(self.path, self.opening(**more), self.agent, self.officer, self.clock)

    def reopen(self, key: Ed25519PrivateKey | None = None) -> Ledger:
        return Ledger.open(self.path, key or self.agent, self.clock)

    def receipt(self, ledger: Ledger) -> Receipt:
        """Asked for, checked and appended."""
        receipt = self.desk.countersign(request(ledger, self.agent, public_hex(self.coordinator)))
        check_receipt(receipt, ledger, public_hex(self.coordinator))
        ledger.append(receipt)
        return receipt

    def train(self, ledger: Ledger, turn: int, epsilon: float, study: str = "anaemia") -> Receipt:
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


def charge(turn: int, epsilon: float, study: str = "anaemia", **more) -> Charge:
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
    return Charge(**(usual | more))


def commit(**more) -> Commit:
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
    return Commit(**(usual | more))


def a_year(world: World) -> Receipt:
    """32 entries of every kind but `carried`, the last one a receipt, which is returned."""
    ledger = world.create()
    ledger.append(Data(fingerprint="sha256:9c0d", units=812, examples=20140))
    ledger.append(
        Approve(plan="5f" * 32, terms={"until": "2025-12-31", "sites": ["st-anne", "Zürich"], "most": 3.7}),
        world.officer,
    )
    ledger.append(commit())
    for turn in range(4):
        world.train(ledger, turn, 0.4 + 0.3 * turn)
    ledger.append(Forget(unit=pseudonym(b"only the site has this", "patient 4711"), reason="withdrew"), world.officer)
    ledger.append(Data(fingerprint="sha256:77ab", units=811, examples=20113))
    world.agent, old = generate(), world.agent
    ledger.rotate(world.agent)
    assert old is not world.agent
    for turn in range(4, 6):
        world.train(ledger, turn, 0.4 + 0.3 * turn)
    ledger.append(Budget(epsilon=2.0, delta=1e-5), world.officer)
    ledger.append(Refusal(study="anaemia", turn=6, reason="epsilon 2.2 of 2"))
    new = generate()
    ledger.append(new_officer(ledger.standing.keys, new), world.officer)
    world.officer = new
    ledger.append(Withdraw(plan="5f" * 32), world.officer)
    ledger.revoke(world.officer, after=ledger.index, reason="a laptop was stolen")
    world.agent = generate()
    ledger.rotate(world.agent, world.officer)
    ledger.append(Budget(epsilon=9.0, delta=1e-5), world.officer)
    ledger.append(commit(study="malaria", plan="e1" * 32))
    world.train(ledger, 0, 2.25, "malaria")
    return world.train(ledger, 1, 2.5, "malaria")
