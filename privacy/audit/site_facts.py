"""Facts about one site after a run, from its verified ledger and from the coordinator's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import HemofedError, LedgerError
from pipeline.records.privacy_record import PrivacyPlanRecord
from pipeline.records.round_record import RoundRecord
from privacy.accounting.accountant import compute_epsilon
from privacy.audit.facts import (
    ApprovalFacts,
    CurvePoint,
    LedgerFacts,
    ParticipationFacts,
    ReceiptFacts,
    SiteFacts,
    SpendingFacts,
)
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
    PrivacyCharge,
    StudyApproved,
    UnitWithdrawn,
)
from privacy.ledger.signatures import fingerprint_of
from privacy.ledger.summary import list_charges
from privacy.ledger.validation import LedgerState
from privacy.ledger.verify import LedgerVerification, verify_ledger

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
    participation: ParticipationFacts,
) -> SiteFacts:
    """`privacy_plan`: from privacy.json, if the site trains with DP-SGD. `participation`: from `participation_facts`."""
    file = home / "ledger.jsonl"
    if not file.is_file():
        problem = "has no ledger, although it was planned to train with differential privacy"
        return SiteFacts(
            ledger=None,
            privacy_plan=privacy_plan,
            participation=participation,
            problems=(problem,) if privacy_plan else (),
        )
    verification = _verify_site_ledger(file, coordinator_receipts)
    spending, problems = None, [f"its ledger does not verify: {problem}" for problem in verification.problems]
    if verification.state is not None:
        try:
            spending = _spending_facts(verification, verification.state, study_hash, privacy_plan is not None)
            problems += _spending_problems(spending, study_hash, privacy_plan, participation)
        except LedgerError as error:
            problems.append(f"its ledger cannot be read to the end: {error}")
    return SiteFacts(
        ledger=_ledger_facts(verification, coordinator_receipts, home),
        privacy_plan=privacy_plan,
        participation=participation,
        spending=spending,
        problems=tuple(problems),
    )


def _verify_site_ledger(file: Path, coordinator_receipts: CoordinatorReceipts) -> LedgerVerification:
    last_receipt = coordinator_receipts.last_receipt_of(verify_ledger(file).state)
    return verify_ledger(
        file, last_receipt, None if coordinator_receipts.public_key is None else {coordinator_receipts.public_key}
    )


def _ledger_facts(
    verification: LedgerVerification, coordinator_receipts: CoordinatorReceipts, home: Path
) -> LedgerFacts:
    entries, state, last_receipt = verification.entries, verification.state, verification.last_receipt
    return LedgerFacts(
        ok=verification.is_valid,
        problems=verification.problems,
        entries=len(entries),
        head=entries[-1].hash if entries else None,
        first_time=entries[0].time if entries else None,
        last_time=entries[-1].time if entries else None,
        anchored=coordinator_receipts.last_receipt_of(state) is not None,
        receipt=last_receipt
        and ReceiptFacts(
            index=last_receipt.index, time=last_receipt.time, key=fingerprint_of(last_receipt.coordinator_key)
        ),
        unreceipted=len(verification.unreceipted_indices),
        agent=state and fingerprint_of(state.keys.agent_key),
        officer=state and fingerprint_of(state.keys.officer_key),
        officer_is_here=(home / "officer.pem").exists(),
        dataset_id=state and state.opening.dataset_id,
    )


def _spending_facts(
    verification: LedgerVerification, state: LedgerState, study_hash: str, has_plan: bool
) -> SpendingFacts:
    entries, budget = verification.entries, state.budget
    charges = list_charges(entries)
    ledger_epsilon = charges[-1].total_epsilon if charges else 0.0
    earlier_charges = charges[: _first_charge_index(charges, study_hash)]
    return SpendingFacts(
        unit=state.opening.privacy_unit,
        budget=budget if charges or has_plan else None,
        spent=ledger_epsilon,
        left=max(0.0, budget.epsilon - ledger_epsilon),
        spent_before=max((c.total_epsilon for c in earlier_charges), default=0.0),
        recomputed=recompute_epsilon(entries, state.opening.budget, budget, ledger_epsilon) if charges else None,
        charges=tuple(charges),
        curve=_spending_curve(charges, study_hash, budget),
        studies=Counter(charge.study for charge in charges),
        refusals=tuple(record for entry in entries if isinstance(record := entry.record, ChargeRefused)),
        approvals=tuple(_approval_facts(e) for e in entries if e.kind in (StudyApproved.kind, ApprovalRevoked.kind)),
        num_withdrawn=sum(entry.kind == UnitWithdrawn.kind for entry in entries),
        data=tuple(record for entry in entries if isinstance(record := entry.record, DatasetSnapshot)),
    )


def _spending_problems(
    spending: SpendingFacts,
    study_hash: str,
    privacy_plan: PrivacyPlanRecord | None,
    participation: ParticipationFacts,
) -> Iterator[str]:
    ledger_epsilon, recomputed = spending.spent, spending.recomputed
    if recomputed is not None:
        yield from recomputed.problems
    max_epsilon = max(ledger_epsilon, (recomputed and recomputed.epsilon) or 0.0)
    if spending.budget and max_epsilon > spending.budget.epsilon * (1 + BUDGET_TOLERANCE):
        yield f"has spent epsilon {max_epsilon:.4f} of a budget of {spending.budget.epsilon:g}"
    if privacy_plan is None:
        return
    own_charges = [charge for charge in spending.charges if charge.study_hash == study_hash]
    charged_rounds = {charge.round for charge in own_charges}
    if uncharged_rounds := [number for number in participation.accepted if number not in charged_rounds]:
        yield f"took part in {_format_rounds(uncharged_rounds)} without a charge in its ledger"
    yield from _plan_mismatches(privacy_plan, own_charges)
    if (reported_epsilon := participation.epsilon or 0.0) > ledger_epsilon * (1 + BUDGET_TOLERANCE):
        yield f"reported epsilon {reported_epsilon:.4f} to the coordinator, but its ledger has {ledger_epsilon:.4f}"


def _first_charge_index(charges: Sequence[PrivacyCharge], study_hash: str) -> int:
    """The index of the study's first charge."""
    return next((index for index, charge in enumerate(charges) if charge.study_hash == study_hash), len(charges))


def _spending_curve(charges: Sequence[PrivacyCharge], study_hash: str, budget: LedgerBudget) -> tuple[CurvePoint, ...]:
    """Total epsilon after each of the study's charges, by the ledger and by Rényi divergences."""
    return tuple(
        CurvePoint(
            round=c.round,
            epsilon=c.total_epsilon,
            rdp=compute_epsilon(dp_events_of(charges[: index + 1]), budget.delta, "rdp"),
        )
        for index, c in enumerate(charges)
        if c.study_hash == study_hash
    )


def _plan_mismatches(privacy_plan: PrivacyPlanRecord, own_charges: Sequence[PrivacyCharge]) -> list[str]:
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


def _approval_facts(entry: LedgerEntry) -> ApprovalFacts:
    record = entry.record
    assert isinstance(record, StudyApproved | ApprovalRevoked)
    return ApprovalFacts(
        kind=entry.kind,
        time=entry.time,
        officer=entry.officer_decision.key_fingerprint if entry.officer_decision else None,
        study_hash=record.study_hash,
        terms=record.terms,
        consent=record.consent if isinstance(record, StudyApproved) else None,
    )


def participation_facts(rounds: Sequence[RoundRecord], site: str) -> ParticipationFacts:
    """The site's participation in the rounds, according to the coordinator's records."""
    failures = {record.round: record.failures[site] for record in rounds if site in record.failures}
    return ParticipationFacts(
        sampled=tuple(record.round for record in rounds if site in record.sampled_clients),
        accepted=tuple(record.round for record in rounds if site in record.accepted),
        failures=failures,
        out_of_budget=tuple(n for n, failure in failures.items() if failure.kind == "privacy_budget"),
        evaluated=Counter(
            split for record in rounds for split, scores in record.metrics.items() if site in scores.sites
        ),
        epsilon=max((record.epsilon[site] for record in rounds if site in record.epsilon), default=None),
    )


def _format_rounds(rounds: Sequence[int]) -> str:
    listed = ", ".join(map(str, rounds[:8])) + (" and more" if len(rounds) > 8 else "")
    return f"round{'s' if len(rounds) > 1 else ''} {listed}"
