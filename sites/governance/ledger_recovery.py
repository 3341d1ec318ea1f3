"""A new ledger that continues the old one: after a restored backup, a revoked agent key or a lost officer's key.

All charges of the old ledger are carried over. Lost charges are estimated: a site charges only after the receipt of its
last charge, so of m lost entries at most (m + 1) / 2 are charges, and each counts as the largest charge that a study had
left. This is an upper bound for the studies in the copy; for a study that started later, the officer states an epsilon.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pipeline.core.errors import LedgerError, RunFolderError
from pipeline.core.files import exclusive_lock
from privacy.ledger import keys
from privacy.ledger.append_only_file import lock_file, read_from, sync_folder
from privacy.ledger.entry import LedgerEntry, LedgerPosition
from privacy.ledger.ledger import Clock, Ledger, utc_now
from privacy.ledger.records import (
    AgentKeyRevoked,
    CosignerPolicy,
    LedgerBudget,
    LedgerOpened,
    LedgerRecord,
    PrivacyCharge,
    StudyCommitment,
    UnitWithdrawn,
)
from privacy.ledger.summary import continuation_records, list_charges
from privacy.ledger.validation import LedgerState
from privacy.ledger.verify import read_locked, verify_ledger
from sites.governance.withdrawn_units import read_withdrawn_units, write_withdrawn_units

RecordT = TypeVar("RecordT", bound=LedgerRecord)
ESTIMATED_MECHANISM = "estimated: one Gaussian mechanism of this epsilon"


@dataclass(frozen=True)
class LedgerRecovery:
    ledger: Ledger
    old_ledger_path: Path  # of the renamed old file
    num_missing_entries: int  # entries that the coordinator has countersigned and this copy does not have
    lost_charges: tuple[PrivacyCharge, ...]  # estimated
    problems: tuple[str, ...]  # of the old ledger


def recover_ledger(
    home: Path,
    officer_key: Ed25519PrivateKey,
    end_position: LedgerPosition | None = None,
    ledger_id: str | None = None,
    num_lost_charges: int | None = None,
    lost_epsilon: float = 0.0,
    drop_cosigner: bool = False,
    clock: Clock = utc_now,
) -> LedgerRecovery:
    """Replaces HOME/ledger.jsonl by a new ledger and renames the old one.

    `end_position` of `ledger_id`: from the coordinator's error message; None: the last receipt. `num_lost_charges`: None:
    the maximum. `lost_epsilon`: of studies that the copy does not have. `drop_cosigner`: the cosigner's key is lost.
    """
    path = home / "ledger.jsonl"
    with exclusive_lock(home):
        old_bytes = read_locked(path)
        verification = verify_ledger(path)
        if verification.state is None or not verification.entries:
            raise LedgerError(f"{path} cannot be read; restore a copy first: `hemofed site restore`")
        if ledger_id not in (None, verification.entries[0].hash):
            raise RunFolderError(
                f"{path} is ledger {verification.entries[0].hash}, not {ledger_id}; restore a backup of that one first"
            )
        agent_key = _load_or_replace_agent_key(home / "agent.pem", verification.entries)
        end_position = end_position or _last_receipted_position(verification.entries, verification.state)
        num_missing = _count_missing_entries(verification.entries, verification.state, end_position)
        max_lost_charges = (num_missing + 1) // 2
        lost_charges = estimate_lost_charges(
            verification.entries,
            verification.state,
            max_lost_charges if num_lost_charges is None else num_lost_charges,
            lost_epsilon,
            end_position.head,
        )
        note = _recovery_note(num_missing, max_lost_charges, num_lost_charges, lost_epsilon, len(lost_charges))
        previous_ledger, carried = continuation_records(verification.entries, end_position, note, lost_charges)
        old_state = verification.state
        opening = LedgerOpened(
            site=old_state.opening.site,
            dataset_id=old_state.opening.dataset_id,
            privacy_unit=old_state.opening.privacy_unit,
            budget=old_state.opening.budget,
            agent_key=keys.public_hex(agent_key),
            officer_key=keys.public_hex(officer_key),
            previous_ledger=previous_ledger,
        )
        new_path = home / "ledger.new"
        new_path.unlink(missing_ok=True)  # of an interrupted attempt
        new_ledger = Ledger.create(new_path, opening, agent_key, officer_key, clock)
        new_ledger.append(carried, officer_key)
        if old_state.budget != old_state.opening.budget:
            new_ledger.append(LedgerBudget(**old_state.budget.model_dump()), officer_key)
        if old_state.cosigner_key is not None and not drop_cosigner:
            new_ledger.append(CosignerPolicy(cosigner_key=old_state.cosigner_key), officer_key)
        _copy_withdrawn_units(home, verification.entries)
        old_ledger_path = _replace_ledger(path, new_path, old_bytes, previous_ledger.ledger_id)
    return LedgerRecovery(
        Ledger.open(path, agent_key, clock), old_ledger_path, num_missing, tuple(lost_charges), verification.problems
    )


def estimate_lost_charges(
    entries: Sequence[LedgerEntry], ledger_state: LedgerState, num_lost_charges: int, lost_epsilon: float, head: str
) -> list[PrivacyCharge]:
    """For each lost charge the largest charge of every study that could have made it; one more for `lost_epsilon`."""
    if min(num_lost_charges, lost_epsilon) < 0:
        raise RunFolderError("the number of lost charges and the lost epsilon must not be negative")
    known_charges = list_charges(entries)
    commitments = {c.study_hash: c for c in _records_of_type(entries, StudyCommitment)}
    estimated = []
    for study_hash in dict.fromkeys(
        [*commitments, *(charge.study_hash for charge in known_charges if charge.mechanism != ESTIMATED_MECHANISM)]
    ):
        study_charges = [charge for charge in known_charges if charge.study_hash == study_hash]
        commitment = commitments.get(study_hash)
        num_left = (
            num_lost_charges
            if commitment is None
            else min(num_lost_charges, commitment.max_participations - len(study_charges))
        )
        estimated += [_largest_charge(study_charges, commitment, ledger_state)] * max(num_left, 0)
    if lost_epsilon:
        estimated.append(_unknown_study_charge(ledger_state, lost_epsilon, f"unknown, before {head[:16]}"))
    total_epsilon = _total_epsilon([*known_charges, *estimated], ledger_state)
    return [charge.model_copy(update={"total_epsilon": total_epsilon}) for charge in estimated]


def _largest_charge(
    study_charges: Sequence[PrivacyCharge], commitment: StudyCommitment | None, ledger_state: LedgerState
) -> PrivacyCharge:
    if commitment is None:
        return max(study_charges, key=lambda charge: charge.steps)
    return PrivacyCharge(
        study=commitment.study,
        study_hash=commitment.study_hash,
        round=max((charge.round for charge in study_charges), default=0),
        attempt=0,
        job_index=0,
        mechanism=commitment.mechanism,
        noise_multiplier=commitment.noise_multiplier,
        sampling_rate=commitment.sampling_rate,
        steps=commitment.steps_per_round,
        privacy_unit=commitment.privacy_unit,
        total_epsilon=0.0,
        delta=ledger_state.budget.delta,
        accountant="estimated",
    )


def _unknown_study_charge(ledger_state: LedgerState, lost_epsilon: float, study_hash: str) -> PrivacyCharge:
    from privacy.accounting.accountant import calibrate_noise_multiplier

    delta = ledger_state.budget.delta
    return PrivacyCharge(
        study="unknown",
        study_hash=study_hash,
        round=0,
        attempt=0,
        job_index=0,
        mechanism=ESTIMATED_MECHANISM,
        noise_multiplier=calibrate_noise_multiplier(lost_epsilon, delta, 1.0, 1),
        sampling_rate=1.0,
        steps=1,
        privacy_unit=ledger_state.opening.privacy_unit,
        total_epsilon=0.0,
        delta=delta,
        accountant="estimated",
    )


def _total_epsilon(all_charges: Sequence[PrivacyCharge], ledger_state: LedgerState) -> float:
    """Epsilon of all charges, at the budget's delta."""
    from privacy.accounting.accountant import DpEvent
    from privacy.accounting.privacy_filter import FilterBudget, PlannedSpending, compute_spent

    max_epsilon = ledger_state.budget.epsilon or ledger_state.opening.budget.epsilon
    if not all_charges or not max_epsilon:
        return all_charges[-1].total_epsilon if all_charges else 0.0
    charges_by_study: dict[str, list[PrivacyCharge]] = {}
    for charge in all_charges:
        charges_by_study.setdefault(charge.study_hash, []).append(charge)
    planned = {
        study_hash: PlannedSpending(
            study_hash,
            study_charges[0].noise_multiplier,
            study_charges[0].sampling_rate,
            max(charge.steps for charge in study_charges),
            len(study_charges),
        )
        for study_hash, study_charges in charges_by_study.items()
    }
    history = [
        (charge.study_hash, DpEvent(charge.noise_multiplier, charge.sampling_rate, charge.steps))
        for charge in all_charges
    ]
    initial_epsilon = ledger_state.opening.budget.epsilon or None
    return compute_spent(
        history, planned, FilterBudget(max_epsilon, ledger_state.budget.delta, initial_epsilon)
    ).epsilon


def _load_or_replace_agent_key(path: Path, entries: Sequence[LedgerEntry]) -> Ed25519PrivateKey:
    """Loads the site's key. Replaces it by a new one if the officer revoked it."""
    key = keys.load_key(path)
    if all(keys.public_hex(key) != revocation.agent_key for revocation in _records_of_type(entries, AgentKeyRevoked)):
        return key
    path.rename(path.with_name(f"agent.revoked-{keys.public_hex(key)[:8]}.pem"))
    keys.save_key(new_key := keys.generate_key(), path)
    return new_key


def _records_of_type(entries: Sequence[LedgerEntry], record_type: type[RecordT]) -> list[RecordT]:
    return [
        record
        for entry in entries
        if entry.kind == record_type.kind and isinstance(record := entry.record, record_type)
    ]


def _last_receipted_position(entries: Sequence[LedgerEntry], ledger_state: LedgerState) -> LedgerPosition:
    last_receipt = max(ledger_state.receipts, key=lambda receipt: receipt.index, default=None)
    return (
        LedgerPosition(last_receipt.index, last_receipt.head)
        if last_receipt
        else LedgerPosition(entries[-1].index, entries[-1].hash)
    )


def _count_missing_entries(
    entries: Sequence[LedgerEntry], ledger_state: LedgerState, end_position: LedgerPosition
) -> int:
    """Counts from the last receipt: later entries may differ from those that the coordinator has."""
    if end_position.index < len(entries) and entries[end_position.index].hash == end_position.head:
        return 0
    return max(0, end_position.index - min((receipt.index for receipt in ledger_state.receipts), default=0))


def _recovery_note(
    num_missing: int, max_lost_charges: int, num_lost_charges: int | None, lost_epsilon: float, num_charges_added: int
) -> str:
    if not num_missing and not num_charges_added:
        return "nothing is missing"
    charges_text = (
        f"at most {max_lost_charges}, estimated"
        if num_lost_charges is None
        else f"{num_lost_charges}, stated by the officer (at most {max_lost_charges})"
    )
    epsilon_text = f"; unknown studies: epsilon {lost_epsilon:g}, stated by the officer" if lost_epsilon else ""
    return f"{num_missing} entries are lost; charges among them: {charges_text}; {num_charges_added} charges added{epsilon_text}"


def _copy_withdrawn_units(home: Path, entries: Sequence[LedgerEntry]) -> None:
    """Copies withdrawals to the home's list, because the new ledger does not have the old `unit_withdrawn` entries."""
    recorded = (record.unit_pseudonym for record in _records_of_type(entries, UnitWithdrawn))
    if withdrawn := read_withdrawn_units(home).union(recorded):
        write_withdrawn_units(home, withdrawn)


def _replace_ledger(path: Path, new_path: Path, old_bytes: bytes, ledger_id: str) -> Path:
    """Keeps the old file as ledger-ID8.jsonl. The home has a ledger at every moment."""
    candidates = (
        path.with_name(f"ledger-{ledger_id[:8]}{suffix}.jsonl") for suffix in ("", *(f"-{n}" for n in range(2, 100)))
    )
    old_ledger_path = next(candidate for candidate in candidates if not candidate.exists() or candidate.samefile(path))
    with lock_file(path) as file:
        if read_from(file, 0) != old_bytes:
            raise LedgerError(f"{path} has new entries; stop the agent and try again")
        if not old_ledger_path.exists():
            os.link(path, old_ledger_path)
        new_path.replace(path)
    sync_folder(path.parent)
    return old_ledger_path
