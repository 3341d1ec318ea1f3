"""What each entry of a ledger must satisfy, given the entries before it. One step; ledgers and audits take it alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pipeline.core.errors import BadLedger
from privacy.ledger.entry import START, Entry, chained
from privacy.ledger.keys import verified
from privacy.ledger.records import (
    Approve,
    Body,
    Budget,
    Carried,
    Charge,
    Commit,
    Officer,
    Open,
    Policy,
    Receipt,
    Revoke,
    Rotate,
)
from privacy.ledger.signatures import Keys, after, consented, missing, show

# Clocks are set right by seconds, and a machine set to a wrong time zone is off by up to 14 hours. Only what the
# officer signs may go back further: that is the way out after a clock that was ahead by years.
TOLERANCE = timedelta(days=1)


@dataclass(frozen=True)
class Problem:
    index: int
    text: str

    def __str__(self) -> str:
        return f"entry {self.index}: {self.text}"


@dataclass(frozen=True)
class Standing:
    """What the entries so far have settled."""

    opening: Open
    keys: Keys
    budget: Budget
    time: datetime
    decided: int = 0  # entry of the officer's last decision
    charged: int | None = None  # entry of a charge that no receipt covers yet
    carried: bool = False
    receipts: tuple[Receipt, ...] = ()  # the last one of each coordinator
    second: str | None = None  # public key of whoever must sign approvals beside the officer


def check(standing: Standing | None, before: Sequence[Entry], entry: Entry) -> tuple[Standing | None, list[Problem]]:
    """How things stand after the entry, and what is wrong with it, or with earlier ones because of it."""
    texts = list(_unchained(before, entry))
    try:
        body = entry.what
    except BadLedger as error:
        return standing, [Problem(entry.index, text) for text in (*texts, str(error))]
    if standing is None and not isinstance(body, Open):
        texts += [] if before else ["a ledger starts with `open`"]
        return None, [Problem(entry.index, text) for text in texts]
    unsigned = list(missing(standing.keys if standing else None, entry, body))
    texts += unsigned
    texts += _out_of_order(standing, before, entry, body) if standing else _badly_opened(entry)
    problems = [Problem(entry.index, text) for text in texts]
    if isinstance(body, Revoke):
        problems += _disputed(before, entry, body)
    return (standing if unsigned else _settled(standing, entry, body)), problems


def _unchained(before: Sequence[Entry], entry: Entry) -> Iterator[str]:
    index, head = (before[-1].index + 1, before[-1].hash) if before else (0, START)
    if entry.index != index:
        yield f"stands where entry {index} should; entries were removed, added or moved"
    if entry.before != head:
        yield "does not follow from the entry before it"
    if entry.hash != chained(entry.before, entry.digest):
        yield "its hash does not fit what it says; it was edited"


def _badly_opened(entry: Entry) -> Iterator[str]:
    if entry.officer is not None and entry.officer.seen != START:
        yield "the officer's signature is not for a new ledger"


def _out_of_order(standing: Standing, before: Sequence[Entry], entry: Entry, body: Body) -> Iterator[str]:
    time = datetime.fromisoformat(entry.time)
    if time < standing.time - TOLERANCE and not _decided(entry, body):
        yield (
            f"goes back in time, from {standing.time.isoformat()} to {entry.time}; set the clock, or, if it was wrong "
            "before, let the officer sign the next entry"
        )
    if entry.officer and not any(entry.officer.seen == e.hash for e in before[standing.decided :]):
        yield (
            f"the officer signed it before entry {standing.decided}, which he decided too, or for another ledger; let "
            "him see the ledger's head and sign again"
        )
    match body:
        case Open():
            yield "opens the ledger a second time"
        case Carried():
            if standing.carried or standing.opening.continues is None:
                yield "carries charges over, but the ledger continues no other, or has them already"
        case Commit():
            yield from _other_unit(standing, body.unit)
        case Charge():
            yield from _bad_charge(standing, body)
        case Receipt():
            yield from bad_receipt(standing.opening, before, body)
        case Approve() | Policy():
            yield from _unconsented(standing, before, body)
        case Rotate(agent=key) | Officer(officer=key):
            if key == standing.second:
                yield "takes the second person's key; two persons need two keys"
        case Revoke():
            if body.after >= entry.index:
                yield f"revokes a key from entry {body.after} on, which is not written yet"


def _unconsented(standing: Standing, before: Sequence[Entry], body: Approve | Policy) -> Iterator[str]:
    if isinstance(body, Policy) and body.second in {*standing.keys.agents, *standing.keys.officers}:
        yield "names the agent's or the officer's key as the second person's; two persons need two keys"
    if standing.second is None:
        if body.consent is not None:
            yield "carries a second person's signature, and the policy names nobody whose it could be"
    elif body.consent is None:
        yield f"takes two persons: the signature of the second one, whose key is {show(standing.second)}, is missing"
    elif not any(body.consent.seen == e.hash for e in before[standing.decided :]):
        yield "the second person signed it before the officer's last decision, or for another ledger; sign again"
    elif not consented(standing.second, body, standing.keys.ledger):
        yield f"the second person's signature does not fit it, or is not by key {show(standing.second)}"


def _other_unit(standing: Standing, unit: str) -> Iterator[str]:
    if unit != standing.opening.unit:
        yield f"its privacy unit is the {unit}, and this ledger's is the {standing.opening.unit}"


def _bad_charge(standing: Standing, charge: Charge) -> Iterator[str]:
    yield from _other_unit(standing, charge.unit)
    if standing.charged is not None:
        yield f"follows the charge of entry {standing.charged}, which has no receipt; ask the coordinator for it first"
    if standing.opening.continues and not standing.carried:
        yield "is charged before `carried` says what was spent in the ledger that this one continues"
    if charge.delta != standing.budget.delta:
        yield f"reckons with delta {charge.delta:g}, and the budget with {standing.budget.delta:g}"
    elif charge.epsilon > standing.budget.epsilon:
        yield f"passes the budget: epsilon {charge.epsilon:g} of {standing.budget.epsilon:g}"


def bad_receipt(opening: Open, before: Sequence[Entry], receipt: Receipt) -> Iterator[str]:
    if (receipt.site, receipt.dataset_id) != (opening.site, opening.dataset_id):
        yield f"is a receipt for {receipt.site}, {receipt.dataset_id}"
    if receipt.index >= len(before) or before[receipt.index].hash != receipt.head:
        yield f"is a receipt for an entry {receipt.index} that this ledger does not hold"
    if not verified(receipt.key, "receipt", receipt.statement(), receipt.signature):
        yield f"the signature of the coordinator {show(receipt.key)} does not fit its receipt"


def _disputed(before: Sequence[Entry], entry: Entry, body: Revoke) -> Iterator[Problem]:
    for e in before:
        if e.index > body.after and e.key == show(body.agent):
            yield Problem(
                e.index,
                f"is signed by key {e.key}, which the officer revoked (entry {entry.index}) for all after entry "
                f"{body.after}; this ledger is closed, and the officer opens a new one that continues it",
            )


def _decided(entry: Entry, body: Body) -> bool:
    return entry.officer is not None or isinstance(body, Revoke)


def _settled(standing: Standing | None, entry: Entry, body: Body) -> Standing | None:
    time = datetime.fromisoformat(entry.time)
    keys = after(standing.keys if standing else None, entry, body)
    if standing is None:
        return Standing(body, keys, body.budget, time) if isinstance(body, Open) and keys else None
    now = replace(standing, keys=keys or standing.keys, time=max(time, standing.time))
    if _decided(entry, body):
        now = replace(now, decided=entry.index, time=time)
    match body:
        case Budget():
            return replace(now, budget=body)
        case Policy():
            return replace(now, second=body.second)
        case Carried():
            return replace(now, carried=True)
        case Charge():
            return replace(now, charged=entry.index)
        case Receipt():
            others = tuple(r for r in now.receipts if r.key != body.key)
            covered = now.charged is not None and body.index >= now.charged
            return replace(now, receipts=(*others, body), charged=None if covered else now.charged)
        case _:
            return now
