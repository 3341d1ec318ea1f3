"""A site's privacy ledger: an append-only file of signed entries, which the site owns and nobody can shorten unseen.

To train: append the charge, let the coordinator countersign the head (privacy/ledger/receipts.py), append its receipt, and
only then train. A charge that was written counts, whether or not its training took place; after a crash its receipt is
asked for again, and makes way for the next charge. Restoring weights or a backup never refunds anything.

If the officer's key is lost, nothing in this file can replace it. A new ledger is opened whose `open` names the end of
this one (`continues`, see privacy/ledger/summary.py), and the coordinator is told the new officer's fingerprint by telephone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import BadLedger
from privacy.ledger.append_only_file import append_line, locked, mend, read_from, sync_folder
from privacy.ledger.entry import Decision, Entry, Mark, decide, read_line, written
from privacy.ledger.keys import public_hex
from privacy.ledger.records import Body, Budget, Charge, Open, Revoke
from privacy.ledger.signatures import lost, routine, show
from privacy.ledger.summary import charges
from privacy.ledger.validation import Problem, Standing, check

RECKONED = ("charge", "commit", "budget", "carried")  # what a charge's epsilon, and its leave, are computed from
Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


class Ledger:
    """Read, checked and repaired when opened. Several processes may hold the same file; appends take turns."""

    def __init__(self, path: Path, key: Ed25519PrivateKey | None, clock: Clock) -> None:
        self.path, self._key, self._clock = path, key, clock
        self.torn: Path | None = None  # where a line went that a crash had cut short
        self._entries: list[Entry] = []
        self._standing: Standing | None = None
        self._problems: list[Problem] = []
        self._size = 0  # bytes read so far

    @classmethod
    def create(
        cls,
        path: Path,
        opening: Open,
        key: Ed25519PrivateKey,
        officer: Ed25519PrivateKey | Decision,
        clock: Clock = utc_now,
    ) -> Ledger:
        """`officer`: his key, or `decide(his key, opening)` from where he keeps it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger = cls(path, key, clock)
        with locked(path, os.O_RDWR | os.O_CREAT) as file:
            if os.fstat(file).st_size:
                raise BadLedger(
                    f"{path} exists; a ledger is opened once, and a budget belongs to its dataset_id for good"
                )
            ledger._write(file, opening, key, officer)
        sync_folder(path.parent)
        return ledger

    @classmethod
    def open(cls, path: Path, key: Ed25519PrivateKey | None = None, clock: Clock = utc_now) -> Ledger:
        """Without a key to read only. With one a line that a crash cut short is moved aside; `torn` says where to."""
        ledger = cls(path, key, clock)
        with locked(path, os.O_RDWR if key else os.O_RDONLY) as file:
            ledger.torn = mend(file, path) if key else None
            ledger._catch_up(file)
        if not ledger._entries:
            raise BadLedger(f"{path} holds no entry; it was never opened: remove it, and open the ledger again")
        ledger._refuse_problems()
        if key and public_hex(key) != ledger.standing.keys.agent:
            raise BadLedger(
                f"{path} is written with key {show(ledger.standing.keys.agent)}, and this is {show(public_hex(key))}; "
                "load the agent's key, or let the officer replace a lost one"
            )
        return ledger

    def append(self, body: Body, officer: Ed25519PrivateKey | Decision | None = None) -> Entry:
        """On the disk when it returns. `officer`: his key, or `decide(key, body, ledger.id, ledger.head)`."""
        if self._key is None:
            raise BadLedger(f"{self.path} was opened to read; open it with the agent's key to add to it")
        return self._append(body, self._key, officer)

    def refresh(self) -> None:
        """Takes what other processes have added since. Reads little more than that."""
        with locked(self.path, os.O_RDONLY) as file:
            self._catch_up(file)
        self._refuse_problems()

    def rotate(self, new: Ed25519PrivateKey, officer: Ed25519PrivateKey | None = None) -> Entry:
        """Without the officer: routine, by the old key. With him: the old key is lost, so no key is needed to open."""
        if officer is None and self._key is None:
            raise BadLedger(f"{self.path}: a routine rotation needs the old key; if it is lost, the officer must sign")
        if officer is None and self._key is not None:
            entry = self._append(routine(self.standing.keys, self._key, new), self._key, None)
        else:
            entry = self._append(lost(new), new, officer)
        self._key = new
        return entry

    def revoke(self, officer: Ed25519PrivateKey, after: int, reason: str = "", agent: str | None = None) -> Entry:
        """The agent's key in force if not another one is named. To be followed by `rotate(new, officer)`."""
        return self._append(Revoke(agent=agent or self.standing.keys.agent, after=after, reason=reason), officer, None)

    @property
    def standing(self) -> Standing:
        if self._standing is None:
            raise BadLedger(f"{self.path} does not start with an `open` that can be believed")
        return self._standing

    @property
    def id(self) -> str:
        return self.standing.keys.ledger

    @property
    def index(self) -> int:
        return self._entries[-1].index

    @property
    def head(self) -> str:
        return self._entries[-1].hash

    @property
    def mark(self) -> Mark:
        return Mark(self.index, self.head)

    @property
    def budget(self) -> Budget:
        return self.standing.budget

    def entries(self, kind: str | None = None) -> list[Entry]:
        return [entry for entry in self._entries if kind in (None, entry.kind)]

    def spent_events(self) -> list[Charge]:
        return charges(self._entries)

    def digests(self, since: int = 0) -> list[str]:
        return [entry.digest for entry in self._entries[since:]]

    def _append(self, body: Body, key: Ed25519PrivateKey, officer: Ed25519PrivateKey | Decision | None) -> Entry:
        with locked(self.path) as file:
            self.torn = mend(file, self.path) or self.torn
            known = len(self._entries)
            self._catch_up(file)
            self._refuse_problems()
            if isinstance(body, Charge) and any(entry.kind in RECKONED for entry in self._entries[known:]):
                raise BadLedger(f"{self.path} was added to by another process meanwhile; reckon the charge again")
            return self._write(file, body, key, officer)

    def _write(
        self, file: int, body: Body, key: Ed25519PrivateKey, officer: Ed25519PrivateKey | Decision | None
    ) -> Entry:
        if isinstance(officer, Ed25519PrivateKey):
            officer = decide(officer, body, self.id, self.head) if self._entries else decide(officer, body)
        entry = written(body, self._entries, key, officer, self._clock())
        standing, problems = check(self._standing, self._entries, entry)
        if own := [problem.text for problem in problems if problem.index == entry.index]:
            raise BadLedger(f"{self.path}: this `{body.kind}` may not be added: {'; '.join(own)}")
        append_line(file, self.path, entry.line())
        self._take(entry, standing, problems)
        return entry

    def _catch_up(self, file: int) -> None:
        """Takes what was added since, by another process. The caller holds the lock."""
        last = self._entries[-1].line() if self._entries else b""
        data = read_from(file, self._size - len(last))
        if not data.startswith(last):
            raise BadLedger(f"{self.path} was replaced while it was open; restore the newest copy and open it again")
        lines = data[len(last) :].split(b"\n")[:-1]
        for place, line in enumerate(lines, start=len(self._entries) + 1):
            try:
                entry = read_line(line)
            except BadLedger as error:
                raise BadLedger(f"{self.path}, line {place}: {error}; restore the newest copy") from error
            self._take(entry, *check(self._standing, self._entries, entry))

    def _take(self, entry: Entry, standing: Standing | None, problems: list[Problem]) -> None:
        self._entries.append(entry)
        self._standing = standing
        self._problems += problems
        self._size += len(entry.line())

    def _refuse_problems(self) -> None:
        if self._problems:
            more = f" (and {len(self._problems) - 1} more)" if len(self._problems) > 1 else ""
            raise BadLedger(
                f"{self.path} cannot be believed: {self._problems[0]}{more}; restore the newest copy, or show "
                "it to the officer"
            )
