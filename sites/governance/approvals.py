"""The officer's approvals of offers, in the site's ledger: giving, checking and revoking them.

An approval contains its terms: the offer (the study, its hash, every site's key, the coordinator's key, the version), the
data set, the budget, the requested epsilon and the expiry. It is valid only while all of them still hold. The officer
signs it; a cosigner, too, if the ledger's `cosigner_policy` names one. The agent's key is enough to revoke an approval,
because revoking only makes the site do less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AwareDatetime, ValidationError

from pipeline.core.errors import HemofedError, IncompatibleStudyError, RunFolderError
from pipeline.study.offer import StudyOffer
from privacy.ledger.entry import LedgerEntry
from privacy.ledger.keys import canonical_json
from privacy.ledger.ledger import Ledger, utc_now
from privacy.ledger.records import (
    ApprovalRevoked,
    HexDigest,
    LedgerBudget,
    NonEmptyStr,
    StrictModel,
    StudyApproved,
    StudyCommitment,
)
from privacy.ledger.signatures import fingerprint_of, sign_consent
from sites.governance.home import SiteHome
from sites.governance.offers import find_incompatibility, requested_epsilon, site_name

ApprovalState = Literal["approved", "pending", "expired", "revoked", "refused"]
EPSILON_RELATIVE_TOLERANCE = 1e-3  # noise is calibrated to epsilon with this accuracy
APPROVE_HINT = "ask the officer to approve it: `hemofed site approve`"
REAPPROVE_HINT = "ask the officer to approve it again: `hemofed site approve`"


class ApprovalTerms(StrictModel):
    """`terms` of a `study_approved` entry."""

    offer: HexDigest
    run: NonEmptyStr
    dataset_id: NonEmptyStr
    budget: LedgerBudget  # at the time of the approval
    requested_epsilon: float | None  # of this study at this site; None with a noise multiplier, or without DP
    sites: dict[NonEmptyStr, NonEmptyStr]  # fingerprints
    coordinator: NonEmptyStr  # fingerprint
    version: NonEmptyStr
    expires: AwareDatetime


@dataclass(frozen=True)
class ApprovalStatus:
    state: ApprovalState
    reason: str = ""  # with the cure; "" if approved
    terms: ApprovalTerms | None = None

    @property
    def is_approved(self) -> bool:
        return self.state == "approved"


@dataclass(frozen=True)
class RecordedApproval:
    """An approval in the ledger, and the entry that revoked it."""

    entry: LedgerEntry
    record: StudyApproved
    terms: ApprovalTerms
    revocation: LedgerEntry | None


def approve_offer(
    home: SiteHome,
    offer: StudyOffer,
    officer_key: Ed25519PrivateKey,
    expires: datetime,
    cosigner_key: Ed25519PrivateKey | None = None,
    now: datetime | None = None,
) -> LedgerEntry:
    """Appends an approval. `cosigner_key`: required if the ledger's policy names a cosigner."""
    home.ledger.refresh()
    if (incompatibility := find_incompatibility(home, offer)) is not None:
        raise IncompatibleStudyError(f"{offer.run} cannot be approved: {incompatibility}")
    if expires <= (now or utc_now()):
        raise IncompatibleStudyError(
            f"an approval that expires at {expires:%Y-%m-%d %H:%M} would never be valid; choose a later time"
        )
    ledger = home.ledger
    terms = ApprovalTerms(
        offer=offer.digest,
        run=offer.run,
        dataset_id=ledger.state.opening.dataset_id,
        budget=ledger.budget,
        requested_epsilon=requested_epsilon(offer, site_name(home)),
        sites={name: fingerprint_of(key) for name, key in offer.site_keys.items()},
        coordinator=fingerprint_of(offer.coordinator_key),
        version=offer.version,
        expires=expires.astimezone(UTC).replace(microsecond=0),
    )
    record = StudyApproved(study_hash=offer.study_hash, terms=terms.model_dump(mode="json"))
    if cosigner_key is not None:
        record = record.model_copy(update={"consent": sign_consent(cosigner_key, record, ledger.id, ledger.head)})
    return ledger.append(record, officer_key)


def revoke_approval(
    home: SiteHome, run_or_digest: str, officer_key: Ed25519PrivateKey | None = None, reason: str = ""
) -> list[LedgerEntry]:
    """Revokes the approvals of a run or an offer from the next message on. `officer_key` None: uses the agent's key."""
    home.ledger.refresh()
    active_approvals = [approval for approval in recorded_approvals(home.ledger) if approval.revocation is None]
    matching = {
        approval.terms.offer: approval
        for approval in active_approvals
        if run_or_digest in (approval.terms.run, approval.terms.offer)
    }
    if not matching:
        approved_runs = ", ".join(sorted({approval.terms.run for approval in active_approvals})) or "none"
        raise RunFolderError(f"{home.path}: {run_or_digest!r} has no valid approval; approved runs: {approved_runs}")
    return [
        home.ledger.append(
            ApprovalRevoked(
                study_hash=approval.record.study_hash,
                terms={"offer": digest, "run": approval.terms.run, "reason": reason},
            ),
            officer_key,
        )
        for digest, approval in matching.items()
    ]


def check_approval(home: SiteHome, offer: StudyOffer, now: datetime | None = None) -> ApprovalStatus:
    """Whether the offer's approval is valid now. Reads entries that other processes have appended meanwhile."""
    ledger = home.ledger
    ledger.refresh()
    try:
        incompatibility = find_incompatibility(home, offer)
    except HemofedError as error:
        incompatibility = str(error)
    if incompatibility is not None:
        return ApprovalStatus("refused", incompatibility)
    all_approvals = list(recorded_approvals(ledger))
    matching = [
        approval
        for approval in all_approvals
        if (approval.record.study_hash, approval.terms.offer) == (offer.study_hash, offer.digest)
    ]
    if not matching:
        has_changed = any(approval.terms.run == offer.run for approval in all_approvals)
        explanation = (
            f"has changed since it was approved; {REAPPROVE_HINT}"
            if has_changed
            else f"is not approved; {APPROVE_HINT}"
        )
        return ApprovalStatus("pending", f"{offer.run} {explanation}")
    latest = matching[-1]
    # a clock that was set back does not revive an approval: the ledger has the latest time
    latest_time = max(now or utc_now(), ledger.state.time)
    if latest.revocation is not None:
        return ApprovalStatus(
            "revoked", f"{offer.run}: the approval was revoked at {latest.revocation.time[:19]}; {REAPPROVE_HINT}"
        )
    if latest_time >= latest.terms.expires:
        return ApprovalStatus(
            "expired",
            f"{offer.run}: the approval expired at {latest.terms.expires:%Y-%m-%d %H:%M} UTC; {REAPPROVE_HINT}",
        )
    if (problem := next(_changes_since_approval(home, offer, latest), None)) is not None:
        return ApprovalStatus("refused", f"{problem}; {REAPPROVE_HINT}")
    return ApprovalStatus("approved", "", latest.terms)


def _changes_since_approval(home: SiteHome, offer: StudyOffer, approval: RecordedApproval) -> Iterator[str]:
    """Terms that no longer hold."""
    terms, ledger = approval.terms, home.ledger
    if terms.dataset_id != (current_dataset_id := ledger.state.opening.dataset_id):
        yield f"{offer.run} was approved for the data set {terms.dataset_id}, and the ledger is now for {current_dataset_id}"
    if ledger.budget.epsilon < terms.budget.epsilon or ledger.budget.delta < terms.budget.delta:
        yield f"the budget is lower than when {offer.run} was approved: epsilon {ledger.budget.epsilon:g}, was {terms.budget.epsilon:g}"
    if terms.sites != {name: fingerprint_of(key) for name, key in offer.site_keys.items()}:
        yield f"{offer.run}: the sites or their keys have changed since the approval"
    if terms.coordinator != fingerprint_of(offer.coordinator_key) or terms.version != offer.version:
        yield f"{offer.run}: the coordinator's key or the version has changed since the approval"
    if ledger.state.cosigner_key is not None and approval.record.consent is None:
        yield f"{offer.run} was approved by one person, and the site's policy now requires two"
    if terms.requested_epsilon is None:
        return
    commitments = [
        entry.record
        for entry in ledger.entries(StudyCommitment.kind)
        if isinstance(entry.record, StudyCommitment) and entry.record.study_hash == offer.digest
    ]
    max_epsilon = max((commitment.epsilon for commitment in commitments), default=0.0)
    if max_epsilon > terms.requested_epsilon * (1 + EPSILON_RELATIVE_TOLERANCE):
        yield f"{offer.run} has committed to epsilon {max_epsilon:.4g}, and {terms.requested_epsilon:.4g} was approved"


def recorded_approvals(ledger: Ledger) -> Iterator[RecordedApproval]:
    """All approvals in the order of the ledger; skips entries with other terms."""
    index_by_hash = {entry.hash: entry.index for entry in ledger.entries()}
    revocations = [(entry, entry.record) for entry in ledger.entries(ApprovalRevoked.kind)]
    for entry in ledger.entries(StudyApproved.kind):
        record = entry.record
        assert isinstance(record, StudyApproved)
        try:
            terms = ApprovalTerms.model_validate_json(canonical_json(record.terms))
        except ValidationError:
            continue
        # an approval that was signed before a revocation and appended after it is revoked, too
        last_seen_index = index_by_hash[entry.officer_decision.seen_head] if entry.officer_decision else -1
        revocation = next(
            (
                revoking_entry
                for revoking_entry, revoked in revocations
                if revoking_entry.index > last_seen_index
                and isinstance(revoked, ApprovalRevoked)
                and _is_revoked_by(revoked, record, terms)
            ),
            None,
        )
        yield RecordedApproval(entry, record, terms, revocation)


def _is_revoked_by(revocation: ApprovalRevoked, record: StudyApproved, terms: ApprovalTerms) -> bool:
    return revocation.study_hash == record.study_hash and revocation.terms.get("offer") in (None, terms.offer)


def collect_approval_notices(ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    """Notices to the coordinator: the latest decision on every offer. The terms stay at the site."""
    ledger.refresh()
    latest_by_offer = {approval.terms.offer: approval for approval in recorded_approvals(ledger)}
    notices: dict[str, list[dict[str, Any]]] = {"approvals": [], "revoked": []}
    for digest, approval in latest_by_offer.items():
        notice = {"run": approval.terms.run, "offer": digest}
        if approval.revocation is not None:
            notices["revoked"].append(notice | {"at": approval.revocation.time})
        elif approval.entry.officer_decision is not None:
            expires, officer = approval.terms.expires.isoformat(), approval.entry.officer_decision.key_fingerprint
            notices["approvals"].append(notice | {"at": approval.entry.time, "expires": expires, "officer": officer})
    return notices
