"""A new ledger that continues the site's old one: after a restored backup, a closed ledger or a lost officer's key.

All charges of the old ledger are carried over. Those of an end that is lost nobody can read, so they are reckoned: no
charge is made before the last one was receipted, so of m entries at most (m + 1) / 2 are charges, and each is taken to
be the largest that a plan had left to make. That is an upper bound for the plans that the copy knows; for a study that
began after the copy was made, the officer says what it may have cost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import BadLedger, BadRun
from pipeline.core.files import alone_in, write_atomically
from privacy.ledger import keys
from privacy.ledger.append_only_file import locked, read_from, sync_folder
from privacy.ledger.entry import Entry, Mark
from privacy.ledger.ledger import Clock, Ledger, utc_now
from privacy.ledger.records import Body, Budget, Charge, Commit, Forget, Open, Policy, Revoke
from privacy.ledger.summary import charges, continuation
from privacy.ledger.validation import Standing
from privacy.ledger.verify import read_shared, verify

Made = TypeVar("Made", bound=Body)
RECKONED = "reckoned: as one Gaussian mechanism of this epsilon"


@dataclass(frozen=True)
class Continued:
    ledger: Ledger
    aside: Path  # where the old one is now
    missing: int  # entries that the coordinator has seen and this copy does not hold
    lost: tuple[Charge, ...]  # as reckoned
    problems: tuple[str, ...]  # of the old ledger


def continue_ledger(
    home: Path,
    officer: Ed25519PrivateKey,
    end: Mark | None = None,
    ledger: str | None = None,
    lost: int | None = None,
    lost_epsilon: float = 0.0,
    drop_second: bool = False,
    clock: Clock = utc_now,
) -> Continued:
    """`end` of `ledger` as the coordinator's refusal names it; where this one was last receipted if not given. `lost`:
    charges in the lost end, the most possible if not said; `lost_epsilon`: of studies that this copy does not know at
    all; `drop_second`: the second person's key is lost."""
    path = home / "ledger.jsonl"
    with alone_in(home):
        before = read_shared(path)
        old = verify(path)
        if old.standing is None or not old.entries:
            raise BadLedger(f"{path} cannot be read at all; restore a copy of it first: `hemofed site restore`")
        if ledger not in (None, old.entries[0].hash):
            raise BadRun(f"{path} is ledger {old.entries[0].hash}, not {ledger}; restore a backup of that one first")
        agent = _agent(home / "agent.pem", old.entries)
        end = end or _receipted(old.entries, old.standing)
        missing = _missing(old.entries, old.standing, end)
        most = (missing + 1) // 2
        reckoned = reckon(old.entries, old.standing, most if lost is None else lost, lost_epsilon, end.head)
        note = _note(missing, most, lost, lost_epsilon, len(reckoned))
        there, carried = continuation(old.entries, end, note, reckoned)
        was = old.standing
        opening = Open(
            site=was.opening.site, dataset_id=was.opening.dataset_id, unit=was.opening.unit, budget=was.opening.budget,
            agent=keys.public_hex(agent), officer=keys.public_hex(officer), continues=there,
        )  # fmt: skip
        fresh = home / "ledger.new"
        fresh.unlink(missing_ok=True)  # of an attempt that was cut short
        made = Ledger.create(fresh, opening, agent, officer, clock)
        made.append(carried, officer)
        if was.budget != was.opening.budget:
            made.append(Budget(**was.budget.model_dump()), officer)
        if was.second is not None and not drop_second:
            made.append(Policy(second=was.second), officer)
        _keep_forgotten(home, old.entries)
        aside = _exchanged(path, fresh, before, there.ledger)
    return Continued(Ledger.open(path, agent, clock), aside, missing, tuple(reckoned), old.problems)


def reckon(entries: Sequence[Entry], standing: Standing, lost: int, epsilon: float, head: str) -> list[Charge]:
    """For each of `lost` charges the largest of every plan that could have made it, and one more for the `epsilon`."""
    if min(lost, epsilon) < 0:
        raise BadRun("what was lost cannot be less than nothing")
    made = charges(entries)
    commits = {c.plan: c for c in _bodies(entries, Commit)}
    found = []
    for plan in dict.fromkeys([*commits, *(charge.plan for charge in made if charge.mechanism != RECKONED)]):
        own, committed = [charge for charge in made if charge.plan == plan], commits.get(plan)
        left = lost if committed is None else min(lost, committed.turns - len(own))
        found += [_largest(own, committed, standing)] * max(left, 0)
    if epsilon:
        found.append(_unknown(standing, epsilon, f"unknown, before {head[:16]}"))
    total = _total([*made, *found], standing)
    return [charge.model_copy(update={"epsilon": total}) for charge in found]


def _largest(own: Sequence[Charge], committed: Commit | None, standing: Standing) -> Charge:
    if committed is None:
        return max(own, key=lambda charge: charge.steps)
    c, last = committed, max((charge.turn for charge in own), default=0)
    return Charge(
        study=c.study, plan=c.plan, turn=last, attempt=0, nth=0, mechanism=c.mechanism, noise=c.noise, rate=c.rate,
        steps=c.steps_per_turn, unit=c.unit, epsilon=0.0, delta=standing.budget.delta, accountant="reckoned",
    )  # fmt: skip


def _unknown(standing: Standing, epsilon: float, plan: str) -> Charge:
    from privacy.accounting.accountant import noise_for

    delta = standing.budget.delta
    return Charge(
        study="unknown", plan=plan, turn=0, attempt=0, nth=0, mechanism=RECKONED, noise=noise_for(epsilon, delta, 1.0, 1),
        rate=1.0, steps=1, unit=standing.opening.unit, epsilon=0.0, delta=delta, accountant="reckoned",
    )  # fmt: skip


def _total(made: Sequence[Charge], standing: Standing) -> float:
    """Epsilon of all charges, at the budget's delta."""
    from privacy.accounting import privacy_filter as budget
    from privacy.accounting.accountant import Event

    most = standing.budget.epsilon or standing.opening.budget.epsilon
    if not made or not most:
        return made[-1].epsilon if made else 0.0
    by_plan: dict[str, list[Charge]] = {}
    for charge in made:
        by_plan.setdefault(charge.plan, []).append(charge)
    plans = {
        plan: budget.Commitment(plan, own[0].noise, own[0].rate, max(c.steps for c in own), len(own))
        for plan, own in by_plan.items()
    }
    history = [(c.plan, Event(c.noise, c.rate, c.steps)) for c in made]
    first = standing.opening.budget.epsilon or None
    return budget.spent(history, plans, budget.Budget(most, standing.budget.delta, first)).epsilon


def _agent(path: Path, entries: Sequence[Entry]) -> Ed25519PrivateKey:
    """The site's key, or a new one in its place if the officer revoked it: a thief's key opens no ledger."""
    key = keys.load(path)
    if all(keys.public_hex(key) != body.agent for body in _bodies(entries, Revoke)):
        return key
    path.rename(path.with_name(f"agent.revoked-{keys.public_hex(key)[:8]}.pem"))
    keys.save(fresh := keys.generate(), path)
    return fresh


def _bodies(entries: Sequence[Entry], kind: type[Made]) -> list[Made]:
    return [body for entry in entries if entry.kind == kind.kind and isinstance(body := entry.what, kind)]


def _receipted(entries: Sequence[Entry], standing: Standing) -> Mark:
    last = max(standing.receipts, key=lambda receipt: receipt.index, default=None)
    return Mark(last.index, last.head) if last else Mark(entries[-1].index, entries[-1].hash)


def _missing(entries: Sequence[Entry], standing: Standing, end: Mark) -> int:
    """What came after the last receipt may be another branch than the coordinator's, so it is counted from there."""
    if end.index < len(entries) and entries[end.index].hash == end.head:
        return 0
    return max(0, end.index - min((receipt.index for receipt in standing.receipts), default=0))


def _note(missing: int, most: int, lost: int | None, epsilon: float, reckoned: int) -> str:
    if not missing and not reckoned:
        return "nothing is missing"
    said = f"at most {most}, as reckoned" if lost is None else f"{lost}, as the officer says (at most {most})"
    more = f"; unknown studies: epsilon {epsilon:g}, as the officer says" if epsilon else ""
    return f"{missing} entries are lost, of them charges: {said}; {reckoned} charges added for them{more}"


def _keep_forgotten(home: Path, entries: Sequence[Entry]) -> None:
    """A new ledger has no `forget` of the old one's; the home's list has."""
    file = home / "forgotten.json"
    listed = json.loads(file.read_text("utf-8")) if file.exists() else []
    gone = {*listed, *(body.unit for body in _bodies(entries, Forget))}
    if gone:
        write_atomically(file, json.dumps(sorted(gone)).encode())


def _exchanged(path: Path, fresh: Path, before: bytes, ledger: str) -> Path:
    """The old one stays as ledger-ID8.jsonl; there is a ledger at every moment."""
    names = (path.with_name(f"ledger-{ledger[:8]}{again}.jsonl") for again in ("", *(f"-{n}" for n in range(2, 100))))
    aside = next(name for name in names if not name.exists() or name.samefile(path))
    with locked(path) as file:
        if read_from(file, 0) != before:
            raise BadLedger(f"{path} was added to meanwhile; stop the agent, and try again")
        if not aside.exists():
            os.link(path, aside)
        fresh.replace(path)
    sync_folder(path.parent)
    return aside
