"""Values derived from a ledger's entries: charges, export summary, continuation in a new ledger, planned spending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.core.errors import LedgerError
from privacy.ledger.entry import LedgerEntry, LedgerPosition
from privacy.ledger.records import CarriedCharges, LedgerReceipt, PreviousLedger, PrivacyCharge
from privacy.ledger.signatures import fingerprint_of
from privacy.ledger.validation import LedgerState


def list_charges(entries: Sequence[LedgerEntry]) -> list[PrivacyCharge]:
    """All charges on the data set; those carried over from an earlier ledger come first."""
    records = [entry.record for entry in entries if entry.kind in (CarriedCharges.kind, PrivacyCharge.kind)]
    carried = [charge for record in records if isinstance(record, CarriedCharges) for charge in record.charges]
    return carried + [record for record in records if isinstance(record, PrivacyCharge)]


def continuation_records(
    entries: Sequence[LedgerEntry],
    end_position: LedgerPosition | LedgerReceipt | None = None,
    note: str = "",
    lost_charges: Sequence[PrivacyCharge] = (),
) -> tuple[PreviousLedger, CarriedCharges]:
    """For the `opened` and `carried_charges` records of a new ledger, if the old one is closed or the officer's key lost.

    If the newest copy is lost, `end_position` is the end that the coordinator reports, and `lost_charges` are the
    officer's estimate of the charges since this copy. Charges of disputed entries count in full.
    """
    if not entries:
        raise LedgerError("there is nothing to continue: the old ledger has no readable entry")
    last_position = end_position or LedgerPosition(entries[-1].index, entries[-1].hash)
    previous_ledger = PreviousLedger(ledger_id=entries[0].hash, index=last_position.index, head=last_position.head)
    return previous_ledger, CarriedCharges(charges=(*list_charges(entries), *lost_charges), note=note)


def export_sections(
    entries: Sequence[LedgerEntry], state: LedgerState | None, problems: Sequence[str]
) -> dict[str, Any]:
    """The sections of an export that its readers recompute."""
    return {
        "verdict": {"ok": not problems, "problems": list(problems)},
        "keys": _fingerprints(state),
        "summary": _export_summary(entries, state),
    }


def _fingerprints(state: LedgerState | None) -> dict[str, Any]:
    if state is None:
        return {}
    keys_by_role = {
        "agents": state.keys.agent_keys,
        "officers": state.keys.officer_keys,
        "coordinators": [receipt.coordinator_key for receipt in state.receipts],
    }
    return {
        role: {fingerprint_of(public_key): public_key for public_key in keys} for role, keys in keys_by_role.items()
    }


def _export_summary(entries: Sequence[LedgerEntry], state: LedgerState | None) -> dict[str, Any]:
    counts = {"entries": len(entries), "kinds": dict(Counter(entry.kind for entry in entries))}
    if state is None:
        return counts
    charges = _list_readable_charges(entries)
    return counts | {
        "site": state.opening.site,
        "dataset_id": state.opening.dataset_id,
        "unit": state.opening.privacy_unit,
        "budget": state.budget.model_dump(),
        "spent": {"epsilon": charges[-1].total_epsilon, "delta": charges[-1].delta} if charges else None,
        "charges_by_study": dict(Counter(charge.study for charge in charges)),
        "index": entries[-1].index,
        "head": entries[-1].hash,
        "from": entries[0].time,
        "to": entries[-1].time,
    }


def _list_readable_charges(entries: Sequence[LedgerEntry]) -> list[PrivacyCharge]:
    try:
        return list_charges(entries)
    except LedgerError:
        return []
