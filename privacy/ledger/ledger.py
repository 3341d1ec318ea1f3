"""A site's privacy ledger: an append-only file of signed entries that cannot be shortened unnoticed.

Before each training the site appends the charge, lets the coordinator countersign the head
(privacy/ledger/receipts.py), and appends the receipt. A written charge counts even if its training did not take place;
after a crash the site requests its receipt again before the next charge. Restoring weights or a backup refunds nothing.

If the officer's key is lost, nothing in this file can replace it: the officer opens a new ledger whose `opened` record
names the end of this one (`continuation_records`, privacy/ledger/summary.py), and gives the coordinator the new
fingerprint by telephone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import LedgerError
from privacy.ledger.append_only_file import append_line, lock_file, read_from, repair_last_line, sync_folder
from privacy.ledger.entry import (
    LedgerEntry,
    LedgerPosition,
    LedgerVersionError,
    OfficerDecision,
    parse_entry_line,
    sign_decision,
    sign_entry,
)
from privacy.ledger.keys import public_hex
from privacy.ledger.records import (
    AgentKeyRevoked,
    CarriedCharges,
    LedgerBudget,
    LedgerOpened,
    LedgerRecord,
    PrivacyCharge,
    StudyCommitment,
)
from privacy.ledger.signatures import fingerprint_of, lost_key_rotation, routine_rotation
from privacy.ledger.summary import list_charges
from privacy.ledger.validation import EntryProblem, LedgerState, check_entry

# the records from which a charge's epsilon and permission are computed
ACCOUNTING_KINDS = (PrivacyCharge.kind, StudyCommitment.kind, LedgerBudget.kind, CarriedCharges.kind)
Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


class Ledger:
    """Read, validated and repaired when opened. Several processes may open the same file; a lock serializes appends."""

    def __init__(self, path: Path, key: Ed25519PrivateKey | None, clock: Clock) -> None:
        self.path, self._key, self._clock = path, key, clock
        self.torn_line_path: Path | None = None  # file with an incomplete last line after a crash
        self._entries: list[LedgerEntry] = []
        self._state: LedgerState | None = None
        self._problems: list[EntryProblem] = []
        self._num_bytes_read = 0

    @classmethod
    def create(
        cls,
        path: Path,
        opening: LedgerOpened,
        key: Ed25519PrivateKey,
        officer: Ed25519PrivateKey | OfficerDecision,
        clock: Clock = utc_now,
    ) -> Ledger:
        """`officer`: the officer's key, or `sign_decision(officer_key, opening)` made elsewhere."""
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger = cls(path, key, clock)
        with lock_file(path, os.O_RDWR | os.O_CREAT) as fd:
            if os.fstat(fd).st_size:
                raise LedgerError(
                    f"{path} exists; a ledger is opened once, and a budget belongs to its dataset_id permanently"
                )
            ledger._write_record(fd, opening, key, officer)
        sync_folder(path.parent)
        return ledger

    @classmethod
    def open(cls, path: Path, key: Ed25519PrivateKey | None = None, clock: Clock = utc_now) -> Ledger:
        """Read-only without a key. With a key an incomplete last line is moved to the file `torn_line_path`."""
        ledger = cls(path, key, clock)
        with lock_file(path, os.O_RDWR if key else os.O_RDONLY) as fd:
            ledger.torn_line_path = repair_last_line(fd, path) if key else None
            ledger._read_new_entries(fd)
        if not ledger._entries:
            raise LedgerError(f"{path} holds no entry; it was never opened: remove it, and open the ledger again")
        ledger._raise_on_problems()
        if key and public_hex(key) != ledger.state.keys.agent_key:
            raise LedgerError(
                f"{path} is written with key {fingerprint_of(ledger.state.keys.agent_key)}, and this is "
                f"{fingerprint_of(public_hex(key))}; load the agent's key, or let the officer replace a lost one"
            )
        return ledger

    def append(self, record: LedgerRecord, officer: Ed25519PrivateKey | OfficerDecision | None = None) -> LedgerEntry:
        """Returns after the entry is synced to the disk.

        `officer`: the officer's key, or `sign_decision(officer_key, record, ledger.id, ledger.head)` made elsewhere.
        """
        if self._key is None:
            raise LedgerError(f"{self.path} was opened to read; open it with the agent's key to add to it")
        return self._append(record, self._key, officer)

    def refresh(self) -> None:
        """Reads the entries that other processes have added since, and little more."""
        with lock_file(self.path, os.O_RDONLY) as fd:
            self._read_new_entries(fd)
        self._raise_on_problems()

    def rotate_agent_key(self, new_key: Ed25519PrivateKey, officer_key: Ed25519PrivateKey | None = None) -> LedgerEntry:
        """Without the officer's key a routine rotation signed by the old key; with it the old key counts as lost."""
        if officer_key is None and self._key is None:
            raise LedgerError(
                f"{self.path}: a routine rotation needs the old key; if it is lost, the officer must sign"
            )
        if officer_key is None and self._key is not None:
            entry = self._append(routine_rotation(self.state.keys, self._key, new_key), self._key, None)
        else:
            entry = self._append(lost_key_rotation(new_key), new_key, officer_key)
        self._key = new_key
        return entry

    def revoke_agent_key(
        self, officer_key: Ed25519PrivateKey, last_trusted_index: int, reason: str = "", agent_key: str | None = None
    ) -> LedgerEntry:
        """Revokes `agent_key`, by default the current one. Call `rotate_agent_key(new_key, officer_key)` next."""
        return self._append(
            AgentKeyRevoked(
                agent_key=agent_key or self.state.keys.agent_key, last_trusted_index=last_trusted_index, reason=reason
            ),
            officer_key,
            None,
        )

    @property
    def state(self) -> LedgerState:
        if self._state is None:
            raise LedgerError(f"{self.path} does not start with a valid `opened` record")
        return self._state

    @property
    def id(self) -> str:
        return self.state.keys.ledger_id

    @property
    def last_index(self) -> int:
        return self._entries[-1].index

    @property
    def head(self) -> str:
        return self._entries[-1].hash

    @property
    def position(self) -> LedgerPosition:
        return LedgerPosition(self.last_index, self.head)

    @property
    def budget(self) -> LedgerBudget:
        return self.state.budget

    def entries(self, kind: str | None = None) -> list[LedgerEntry]:
        return [entry for entry in self._entries if kind in (None, entry.kind)]

    def list_charges(self) -> list[PrivacyCharge]:
        return list_charges(self._entries)

    @property
    def epsilon_spent(self) -> float:
        """Of the data set, by all studies so far."""
        charges = self.list_charges()
        return charges[-1].total_epsilon if charges else 0.0

    def digests(self, since_index: int = 0) -> list[str]:
        return [entry.digest for entry in self._entries[since_index:]]

    def _append(
        self, record: LedgerRecord, key: Ed25519PrivateKey, officer: Ed25519PrivateKey | OfficerDecision | None
    ) -> LedgerEntry:
        with lock_file(self.path) as fd:
            self.torn_line_path = repair_last_line(fd, self.path) or self.torn_line_path
            num_known = len(self._entries)
            self._read_new_entries(fd)
            self._raise_on_problems()
            if isinstance(record, PrivacyCharge) and any(
                entry.kind in ACCOUNTING_KINDS for entry in self._entries[num_known:]
            ):
                raise LedgerError(f"{self.path} was added to by another process meanwhile; compute the charge again")
            return self._write_record(fd, record, key, officer)

    def _write_record(
        self, fd: int, record: LedgerRecord, key: Ed25519PrivateKey, officer: Ed25519PrivateKey | OfficerDecision | None
    ) -> LedgerEntry:
        if isinstance(officer, Ed25519PrivateKey):
            officer = (
                sign_decision(officer, record, self.id, self.head) if self._entries else sign_decision(officer, record)
            )
        entry = sign_entry(record, self._entries, key, officer, self._clock())
        state, problems = check_entry(self._state, self._entries, entry)
        if own_problems := [problem.text for problem in problems if problem.index == entry.index]:
            raise LedgerError(f"{self.path}: this `{record.kind}` may not be added: {'; '.join(own_problems)}")
        append_line(fd, self.path, entry.to_line())
        self._add_entry(entry, state, problems)
        return entry

    def _read_new_entries(self, fd: int) -> None:
        """Reads the entries that were added since. The caller holds the lock."""
        last_line = self._entries[-1].to_line() if self._entries else b""
        data = read_from(fd, self._num_bytes_read - len(last_line))
        if not data.startswith(last_line):
            raise LedgerError(f"{self.path} was replaced while it was open; restore the newest copy and open it again")
        lines = data[len(last_line) :].split(b"\n")[:-1]
        for line_number, line in enumerate(lines, start=len(self._entries) + 1):
            try:
                entry = parse_entry_line(line)
            except LedgerVersionError as error:
                raise LedgerVersionError(f"{self.path}: {error}") from error
            except LedgerError as error:
                raise LedgerError(f"{self.path}, line {line_number}: {error}; restore the newest copy") from error
            self._add_entry(entry, *check_entry(self._state, self._entries, entry))

    def _add_entry(self, entry: LedgerEntry, state: LedgerState | None, problems: list[EntryProblem]) -> None:
        self._entries.append(entry)
        self._state = state
        self._problems += problems
        self._num_bytes_read += len(entry.to_line())

    def _raise_on_problems(self) -> None:
        if self._problems:
            more_text = f" (and {len(self._problems) - 1} more)" if len(self._problems) > 1 else ""
            raise LedgerError(
                f"{self.path} is not valid: {self._problems[0]}{more_text}; restore the newest copy, or show it to the officer"
            )
