"""Validation of one ledger entry given the entries before it. Ledgers and audits use the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pipeline.core.errors import LedgerError
from privacy.ledger.entry import GENESIS_HASH, LedgerEntry, chain_hash
from privacy.ledger.keys import is_valid_signature
from privacy.ledger.records import (
    AgentKeyRevoked,
    AgentKeyRotated,
    CarriedCharges,
    CosignerPolicy,
    LedgerBudget,
    LedgerOpened,
    LedgerReceipt,
    LedgerRecord,
    OfficerKeyRotated,
    PrivacyCharge,
    StudyApproved,
    StudyCommitment,
)
from privacy.ledger.signatures import KeyHistory, apply_key_change, fingerprint_of, is_consent_valid, signature_problems

# Clock corrections are seconds, and a wrong time zone is at most 14 hours off. Only an entry that the officer signs may
# go back further: this repairs a ledger whose clock was years ahead.
CLOCK_TOLERANCE = timedelta(days=1)


@dataclass(frozen=True)
class EntryProblem:
    index: int
    text: str

    def __str__(self) -> str:
        return f"entry {self.index}: {self.text}"


@dataclass(frozen=True)
class LedgerState:
    """The state that follows from the entries so far."""

    opening: LedgerOpened
    keys: KeyHistory
    budget: LedgerBudget
    time: datetime
    last_decision_index: int = 0  # index of the officer's last decision
    unreceipted_charge_index: int | None = None  # of a charge that no receipt covers yet
    has_carried_charges: bool = False
    receipts: tuple[LedgerReceipt, ...] = ()  # the last one from each coordinator
    cosigner_key: str | None = None  # public key of the person who must cosign approvals


def check_entry(
    state: LedgerState | None, previous_entries: Sequence[LedgerEntry], entry: LedgerEntry
) -> tuple[LedgerState | None, list[EntryProblem]]:
    """The state after the entry, and the problems of this entry or of earlier ones that it reveals."""
    messages = list(_chain_problems(previous_entries, entry))
    try:
        record = entry.record
    except LedgerError as error:
        return state, [EntryProblem(entry.index, message) for message in (*messages, str(error))]
    if state is None and not isinstance(record, LedgerOpened):
        messages += [] if previous_entries else ["a ledger starts with `opened`"]
        return None, [EntryProblem(entry.index, message) for message in messages]
    signature_messages = list(signature_problems(state.keys if state else None, entry, record))
    messages += signature_messages
    messages += _record_problems(state, previous_entries, entry, record) if state else _opening_problems(entry)
    problems = [EntryProblem(entry.index, message) for message in messages]
    if isinstance(record, AgentKeyRevoked):
        problems += _revoked_entry_problems(previous_entries, entry, record)
    return (state if signature_messages else _apply_record(state, entry, record)), problems


def _chain_problems(previous_entries: Sequence[LedgerEntry], entry: LedgerEntry) -> Iterator[str]:
    expected_index, expected_head = (
        (previous_entries[-1].index + 1, previous_entries[-1].hash) if previous_entries else (0, GENESIS_HASH)
    )
    if entry.index != expected_index:
        yield f"is in the place of entry {expected_index}; entries were removed, added or moved"
    if entry.previous_hash != expected_head:
        yield "its previous hash is not the hash of the entry before it"
    if entry.hash != chain_hash(entry.previous_hash, entry.digest):
        yield "its hash does not match its contents; it was edited"


def _opening_problems(entry: LedgerEntry) -> Iterator[str]:
    if entry.officer_decision is not None and entry.officer_decision.seen_head != GENESIS_HASH:
        yield "the officer's signature is not for a new ledger"


def _record_problems(
    state: LedgerState, previous_entries: Sequence[LedgerEntry], entry: LedgerEntry, record: LedgerRecord
) -> Iterator[str]:
    time = datetime.fromisoformat(entry.time)
    if time < state.time - CLOCK_TOLERANCE and not _is_officer_decision(entry, record):
        yield (
            f"goes back in time, from {state.time.isoformat()} to {entry.time}; set the clock or, if it was wrong "
            "before, let the officer sign the next entry"
        )
    if entry.officer_decision and not any(
        entry.officer_decision.seen_head == e.hash for e in previous_entries[state.last_decision_index :]
    ):
        yield (
            f"the officer signed it before deciding entry {state.last_decision_index}, or for another ledger; let the officer "
            "see the ledger's head and sign again"
        )
    match record:
        case LedgerOpened():
            yield "opens the ledger a second time"
        case CarriedCharges():
            if state.has_carried_charges or state.opening.previous_ledger is None:
                yield "carries charges over, but the ledger continues no other ledger, or has them already"
        case StudyCommitment():
            yield from _unit_problems(state, record.privacy_unit)
        case PrivacyCharge():
            yield from _charge_problems(state, record)
        case LedgerReceipt():
            yield from receipt_problems(state.opening, previous_entries, record)
        case StudyApproved() | CosignerPolicy():
            yield from _consent_problems(state, previous_entries, record)
        case AgentKeyRotated(agent_key=new_key) | OfficerKeyRotated(officer_key=new_key):
            if new_key == state.cosigner_key:
                yield "is the cosigner's key; two persons need two keys"
        case AgentKeyRevoked():
            if record.last_trusted_index >= entry.index:
                yield f"revokes a key from entry {record.last_trusted_index} on, which is not written yet"


def _consent_problems(
    state: LedgerState, previous_entries: Sequence[LedgerEntry], record: StudyApproved | CosignerPolicy
) -> Iterator[str]:
    if isinstance(record, CosignerPolicy) and record.cosigner_key in {*state.keys.agent_keys, *state.keys.officer_keys}:
        yield "names the agent's or the officer's key as the cosigner's; two persons need two keys"
    if state.cosigner_key is None:
        if record.consent is not None:
            yield "has a cosigner's signature, but the policy names no cosigner"
    elif record.consent is None:
        yield f"needs two signatures: the one by the cosigner's key {fingerprint_of(state.cosigner_key)} is missing"
    elif not any(record.consent.seen_head == e.hash for e in previous_entries[state.last_decision_index :]):
        yield "the cosigner signed it before the officer's last decision, or for another ledger; sign again"
    elif not is_consent_valid(state.cosigner_key, record, state.keys.ledger_id):
        yield f"the cosigner's signature is not valid, or not by key {fingerprint_of(state.cosigner_key)}"


def _unit_problems(state: LedgerState, privacy_unit: str) -> Iterator[str]:
    if privacy_unit != state.opening.privacy_unit:
        yield f"its privacy unit is the {privacy_unit}, and this ledger's is the {state.opening.privacy_unit}"


def _charge_problems(state: LedgerState, charge: PrivacyCharge) -> Iterator[str]:
    yield from _unit_problems(state, charge.privacy_unit)
    if state.unreceipted_charge_index is not None:
        yield f"follows the charge of entry {state.unreceipted_charge_index}, which has no receipt; ask the coordinator for it first"
    if state.opening.previous_ledger and not state.has_carried_charges:
        yield "comes before the `carried_charges` of the ledger that this one continues"
    if charge.delta != state.budget.delta:
        yield f"has delta {charge.delta:g}, and the budget has {state.budget.delta:g}"
    elif charge.total_epsilon > state.budget.epsilon:
        yield f"exceeds the budget: epsilon {charge.total_epsilon:g} of {state.budget.epsilon:g}"


def receipt_problems(
    opening: LedgerOpened, previous_entries: Sequence[LedgerEntry], receipt: LedgerReceipt
) -> Iterator[str]:
    if (receipt.site, receipt.dataset_id) != (opening.site, opening.dataset_id):
        yield f"is a receipt for {receipt.site}, {receipt.dataset_id}"
    if receipt.index >= len(previous_entries) or previous_entries[receipt.index].hash != receipt.head:
        yield f"is a receipt for an entry {receipt.index} that this ledger does not hold"
    if not is_valid_signature(receipt.coordinator_key, "receipt", receipt.signed_content(), receipt.signature):
        yield f"the signature of coordinator {fingerprint_of(receipt.coordinator_key)} on the receipt is not valid"


def _revoked_entry_problems(
    previous_entries: Sequence[LedgerEntry], entry: LedgerEntry, record: AgentKeyRevoked
) -> Iterator[EntryProblem]:
    for previous in previous_entries:
        if previous.index > record.last_trusted_index and previous.key_fingerprint == fingerprint_of(record.agent_key):
            yield EntryProblem(
                previous.index,
                f"is signed by key {previous.key_fingerprint}, which the officer revoked (entry {entry.index}) for all after entry "
                f"{record.last_trusted_index}; this ledger is closed, and the officer opens a new one that continues it",
            )


def _is_officer_decision(entry: LedgerEntry, record: LedgerRecord) -> bool:
    return entry.officer_decision is not None or isinstance(record, AgentKeyRevoked)


def _apply_record(state: LedgerState | None, entry: LedgerEntry, record: LedgerRecord) -> LedgerState | None:
    time = datetime.fromisoformat(entry.time)
    keys = apply_key_change(state.keys if state else None, entry, record)
    if state is None:
        return LedgerState(record, keys, record.budget, time) if isinstance(record, LedgerOpened) and keys else None
    new_state = replace(state, keys=keys or state.keys, time=max(time, state.time))
    if _is_officer_decision(entry, record):
        new_state = replace(new_state, last_decision_index=entry.index, time=time)
    match record:
        case LedgerBudget():
            return replace(new_state, budget=record)
        case CosignerPolicy():
            return replace(new_state, cosigner_key=record.cosigner_key)
        case CarriedCharges():
            return replace(new_state, has_carried_charges=True)
        case PrivacyCharge():
            return replace(new_state, unreceipted_charge_index=entry.index)
        case LedgerReceipt():
            other_receipts = tuple(r for r in new_state.receipts if r.coordinator_key != record.coordinator_key)
            is_covered = (
                new_state.unreceipted_charge_index is not None and record.index >= new_state.unreceipted_charge_index
            )
            return replace(
                new_state,
                receipts=(*other_receipts, record),
                unreceipted_charge_index=None if is_covered else new_state.unreceipted_charge_index,
            )
        case _:
            return new_state
