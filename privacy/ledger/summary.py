"""What follows from a ledger's entries: what was spent, a page's worth of counts, and how a new ledger continues it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.core.errors import BadLedger
from privacy.ledger.entry import Entry, Mark
from privacy.ledger.records import Carried, Charge, Continues, Receipt
from privacy.ledger.signatures import show
from privacy.ledger.validation import Standing


def charges(entries: Sequence[Entry]) -> list[Charge]:
    """All that was ever spent on the data set, what an earlier ledger carried over first."""
    bodies = [entry.what for entry in entries if entry.kind in ("carried", "charge")]
    before = [charge for body in bodies if isinstance(body, Carried) for charge in body.charges]
    return before + [body for body in bodies if isinstance(body, Charge)]


def continuation(
    entries: Sequence[Entry], end: Mark | Receipt | None = None, note: str = "", lost: Sequence[Charge] = ()
) -> tuple[Continues, Carried]:
    """For the `open` and the `carried` of a new ledger, when the old one is closed or the officer's key is gone.

    If the newest copy is lost, `end` is where the coordinator says that it ended, and `lost` what the officer reckons
    was charged in between. Charges of disputed entries count: a doubt never refunds anything.
    """
    if not entries:
        raise BadLedger("there is nothing to continue: the old ledger has no entry that can be read")
    last = end or Mark(entries[-1].index, entries[-1].hash)
    there = Continues(ledger=entries[0].hash, index=last.index, head=last.head)
    return there, Carried(charges=(*charges(entries), *lost), note=note)


def derived(entries: Sequence[Entry], standing: Standing | None, problems: Sequence[str]) -> dict[str, Any]:
    """The parts of an export that its readers recompute."""
    return {
        "verdict": {"ok": not problems, "problems": list(problems)},
        "keys": _keys(standing),
        "summary": _summary(entries, standing),
    }


def _keys(standing: Standing | None) -> dict[str, Any]:
    if standing is None:
        return {}
    groups = {
        "agents": standing.keys.agents,
        "officers": standing.keys.officers,
        "coordinators": [receipt.key for receipt in standing.receipts],
    }
    return {who: {show(public): public for public in keys} for who, keys in groups.items()}


def _summary(entries: Sequence[Entry], standing: Standing | None) -> dict[str, Any]:
    counts = {"entries": len(entries), "kinds": dict(Counter(entry.kind for entry in entries))}
    if standing is None:
        return counts
    spent = _readable_charges(entries)
    return counts | {
        "site": standing.opening.site,
        "dataset_id": standing.opening.dataset_id,
        "unit": standing.opening.unit,
        "budget": standing.budget.model_dump(),
        "spent": {"epsilon": spent[-1].epsilon, "delta": spent[-1].delta} if spent else None,
        "charges_by_study": dict(Counter(charge.study for charge in spent)),
        "index": entries[-1].index,
        "head": entries[-1].hash,
        "from": entries[0].time,
        "to": entries[-1].time,
    }


def _readable_charges(entries: Sequence[Entry]) -> list[Charge]:
    try:
        return charges(entries)
    except BadLedger:
        return []
