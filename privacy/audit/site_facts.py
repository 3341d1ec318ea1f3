"""Facts about one site after a run, from its verified ledger and from the coordinator's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import HemofedError, LedgerError
from pipeline.records.privacy_record import PrivacyPlanRecord
from pipeline.records.round_record import RoundRecord
from privacy.accounting.accountant import compute_epsilon
from privacy.audit.recompute_epsilon import dp_events_of, recompute_epsilon
from privacy.ledger import keys
from privacy.ledger.countersigner import CountersignedState
from privacy.ledger.entry import LedgerEntry
from privacy.ledger.records import (
    ApprovalRevoked,
    ChargeRefused,
    DatasetSnapshot,
    LedgerBudget,
    LedgerReceipt,
    StudyApproved,
    UnitWithdrawn,
)
from privacy.ledger.signatures import fingerprint_of
from privacy.ledger.summary import list_charges
from privacy.ledger.validation import LedgerState
from privacy.ledger.verify import LedgerVerification, verify_ledger

Json = Mapping[str, Any]
BUDGET_TOLERANCE = 1e-9  # relative, for rounding


@dataclass(frozen=True)
class CoordinatorReceipts:
    """The coordinator's last receipt of each ledger, and its public key."""

    receipts: tuple[LedgerReceipt, ...] = ()
    public_key: str | None = None
    problems: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> CoordinatorReceipts:
        receipts, problems = [], []
        for file in sorted((folder / "receipts").glob("*.json")):
            try:
                receipts.append(CountersignedState.load(file).receipt)
            except LedgerError as error:
                problems.append(f"the coordinator's receipt: {error}")
        try:
            public_key = keys.public_hex(keys.load_key(folder / "key.pem"))
        except HemofedError:
            public_key = None  # missing, or not readable for this user
        return cls(tuple(receipts), public_key, tuple(problems))

    def last_receipt_of(self, state: LedgerState | None) -> LedgerReceipt | None:
        if state is None:
            return None
        ledger_key = (state.opening.site, state.opening.dataset_id)
        return next((r for r in self.receipts if (r.site, r.dataset_id) == ledger_key), None)


def collect_site_facts(
    home: Path,
    coordinator_receipts: CoordinatorReceipts,
    study_hash: str,
    privacy_plan: PrivacyPlanRecord | None,
    participation: Json,
) -> dict[str, Any]:
    """`privacy_plan`: from privacy.json, if the site trains with DP-SGD. `participation`: from `participation_facts`."""
    file = home / "ledger.jsonl"
    if not file.is_file():
        problems = ["has no ledger, although it was planned to train with differential privacy"] if privacy_plan else []
        plan_facts = privacy_plan and privacy_plan.to_dict()
        return {"ledger": None, "privacy_plan": plan_facts, "participation": participation, "problems": problems}
    verification = _verify_site_ledger(file, coordinator_receipts)
    facts: dict[str, Any] = {
        "ledger": _ledger_facts(verification, coordinator_receipts, home),
        "privacy_plan": privacy_plan and privacy_plan.to_dict(),
        "participation": participation,
        "problems": [f"its ledger does not verify: {problem}" for problem in verification.problems],
    }
    if verification.state is None:
        return facts
    try:
        return _add_spending_facts(facts, verification, verification.state, study_hash, privacy_plan)
    except LedgerError as error:
        return facts | {"problems": [*facts["problems"], f"its ledger cannot be read to the end: {error}"]}


def _verify_site_ledger(file: Path, coordinator_receipts: CoordinatorReceipts) -> LedgerVerification:
    last_receipt = coordinator_receipts.last_receipt_of(verify_ledger(file).state)
    return verify_ledger(
        file, last_receipt, None if coordinator_receipts.public_key is None else {coordinator_receipts.public_key}
    )


def _ledger_facts(
    verification: LedgerVerification, coordinator_receipts: CoordinatorReceipts, home: Path
) -> dict[str, Any]:
    entries, state, last_receipt = verification.entries, verification.state, verification.last_receipt
    return {
        "ok": verification.is_valid,
        "problems": list(verification.problems),
        "entries": len(entries),
        "head": entries[-1].hash if entries else None,
        "from": entries[0].time if entries else None,
        "to": entries[-1].time if entries else None,
        "anchored": coordinator_receipts.last_receipt_of(state) is not None,
        "receipt": last_receipt
        and {
            "index": last_receipt.index,
            "time": last_receipt.time,
            "key": fingerprint_of(last_receipt.coordinator_key),
        },
        "unreceipted": len(verification.unreceipted_indices),
        "agent": state and fingerprint_of(state.keys.agent_key),
        "officer": state and fingerprint_of(state.keys.officer_key),
        "officer_is_here": (home / "officer.pem").exists(),
        "dataset_id": state and state.opening.dataset_id,
    }


def _add_spending_facts(
    facts: dict[str, Any],
    verification: LedgerVerification,
    state: LedgerState,
    study_hash: str,
    privacy_plan: PrivacyPlanRecord | None,
) -> dict[str, Any]:
    entries, budget = verification.entries, state.budget
    charges = list_charges(entries)
    ledger_epsilon = charges[-1].total_epsilon if charges else 0.0
    recomputed = recompute_epsilon(entries, state.opening.budget, budget, ledger_epsilon) if charges else None
    max_epsilon = max(ledger_epsilon, (recomputed or {}).get("epsilon") or 0.0)
    problems = [*facts["problems"], *(recomputed or {}).get("problems", ())]
    if max_epsilon > budget.epsilon * (1 + BUDGET_TOLERANCE):
        problems.append(f"has spent epsilon {max_epsilon:.4f} of a budget of {budget.epsilon:g}")
    own_charges = [charge for charge in charges if charge.study_hash == study_hash]
    if privacy_plan is not None:
        charged_rounds = {charge.round for charge in own_charges}
        if uncharged_rounds := [
            round_number for round_number in facts["participation"]["accepted"] if round_number not in charged_rounds
        ]:
            problems.append(f"took part in {_format_rounds(uncharged_rounds)} without a charge in its ledger")
        problems += _plan_mismatches(privacy_plan, own_charges)
        if (reported_epsilon := facts["participation"]["epsilon"] or 0.0) > ledger_epsilon * (1 + BUDGET_TOLERANCE):
            problems.append(
                f"reported epsilon {reported_epsilon:.4f} to the coordinator, but its ledger has {ledger_epsilon:.4f}"
            )
    return facts | {
        "unit": state.opening.privacy_unit,
        "budget": budget.model_dump() if charges or privacy_plan else None,
        "spent": ledger_epsilon,
        "left": max(0.0, budget.epsilon - ledger_epsilon),
        "spent_before": max(
            (c.total_epsilon for c in charges[: _first_charge_index(charges, study_hash)]), default=0.0
        ),
        "recomputed": recomputed,
        "charges": [charge.model_dump(mode="json") for charge in charges],
        "curve": _spending_curve(charges, study_hash, budget),
        "studies": {study: sum(c.study == study for c in charges) for study in dict.fromkeys(c.study for c in charges)},
        "refusals": [record.model_dump() for record in _records_of(entries, ChargeRefused)],
        "approvals": [_decision_facts(e) for e in entries if e.kind in (StudyApproved.kind, ApprovalRevoked.kind)],
        "num_withdrawn": sum(entry.kind == UnitWithdrawn.kind for entry in entries),
        "data": [record.model_dump() for record in _records_of(entries, DatasetSnapshot)],
        "problems": problems,
    }


def _records_of(
    entries: Sequence[LedgerEntry], record_type: type[ChargeRefused] | type[DatasetSnapshot]
) -> list[ChargeRefused | DatasetSnapshot]:
    return [record for entry in entries if isinstance(record := entry.record, record_type)]


def _first_charge_index(charges: Sequence[Any], study_hash: str) -> int:
    """The index of the study's first charge."""
    return next((index for index, charge in enumerate(charges) if charge.study_hash == study_hash), len(charges))


def _spending_curve(charges: Sequence[Any], study_hash: str, budget: LedgerBudget) -> list[dict[str, float]]:
    """Total epsilon after each of the study's charges, by the ledger and by Rényi divergences."""
    return [
        {
            "round": c.round,
            "epsilon": c.total_epsilon,
            "rdp": compute_epsilon(dp_events_of(charges[: index + 1]), budget.delta, "rdp"),
        }
        for index, c in enumerate(charges)
        if c.study_hash == study_hash
    ]


def _plan_mismatches(privacy_plan: PrivacyPlanRecord, own_charges: Sequence[Any]) -> list[str]:
    """Charges that differ from the plan in privacy.json."""
    is_as_planned = all(
        (c.noise_multiplier, c.sampling_rate, c.privacy_unit)
        == (privacy_plan.noise_multiplier, privacy_plan.sampling_rate, privacy_plan.privacy_unit)
        and c.steps <= privacy_plan.steps_per_round
        for c in own_charges
    )
    return (
        []
        if is_as_planned
        else ["its charges differ from privacy.json in noise multiplier, sampling rate, steps or unit"]
    )


def _decision_facts(entry: LedgerEntry) -> dict[str, Any]:
    officer_fingerprint = entry.officer_decision.key_fingerprint if entry.officer_decision else None
    return {"kind": entry.kind, "time": entry.time, "officer": officer_fingerprint, **dict(entry.body)}


def participation_facts(rounds: Sequence[RoundRecord], site: str) -> dict[str, Any]:
    """The site's participation in the rounds, according to the coordinator's records."""
    failures = {record.round: record.failures[site] for record in rounds if site in record.failures}
    num_evaluations = Counter(
        split for record in rounds for split, scores in record.metrics.items() if site in scores.sites
    )
    return {
        "sampled": [record.round for record in rounds if site in record.sampled_clients],
        "accepted": [record.round for record in rounds if site in record.accepted],
        "failures": {str(round_number): asdict(failure) for round_number, failure in failures.items()},
        "out_of_budget": [n for n, failure in failures.items() if failure.kind == "privacy_budget"],
        "evaluated": dict(num_evaluations),
        "epsilon": max((record.epsilon[site] for record in rounds if site in record.epsilon), default=None),
    }


def _format_rounds(rounds: Sequence[int]) -> str:
    listed = ", ".join(map(str, rounds[:8])) + (" and more" if len(rounds) > 8 else "")
    return f"round{'s' if len(rounds) > 1 else ''} {listed}"
