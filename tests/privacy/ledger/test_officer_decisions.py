"""Decisions of the officer: which records need one, replay of old ones, and clocks that were wrong."""

from datetime import UTC, datetime, timedelta

import pytest

from privacy.ledger.entry import sign_decision
from privacy.ledger.keys import generate_key
from privacy.ledger.records import ApprovalRevoked, CosignerPolicy, LedgerBudget, StudyApproved
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import DATASET, STUDY_HASH, LedgerParties, assert_refused


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        StudyApproved(study_hash=STUDY_HASH),
        CosignerPolicy(cosigner_key="ab" * 32),
        LedgerBudget(epsilon=100.0, delta=1e-5),
    ],
)
def test_records_that_only_the_officer_may_decide(parties, record):
    ledger = parties.create_ledger()
    assert_refused(ledger, record, None, "for the officer to decide, and the officer's signature is missing")
    assert_refused(ledger, record, generate_key(), "is decided with key")
    assert_refused(ledger, record, parties.agent, "is decided with key")
    ledger.append(record, parties.officer)
    assert verify_ledger(parties.path).is_valid


def test_approval_is_revoked_by_agent_or_officer(parties):
    """The agent may do it alone, but not in the officer's name."""
    ledger = parties.create_ledger()
    assert_refused(ledger, ApprovalRevoked(study_hash=STUDY_HASH), generate_key(), "is decided with key")
    ledger.append(ApprovalRevoked(study_hash=STUDY_HASH))
    ledger.append(ApprovalRevoked(study_hash=STUDY_HASH), parties.officer)
    assert verify_ledger(parties.path).is_valid


def test_officer_signs_elsewhere_during_training(parties):
    ledger = parties.create_ledger()
    budget = LedgerBudget(epsilon=20.0, delta=1e-5)
    decision = sign_decision(parties.officer, budget, ledger.id, ledger.head)
    parties.charge_round(ledger, 0, 0.5)
    ledger.append(budget, decision)
    assert ledger.budget.epsilon == 20
    assert verify_ledger(parties.path).is_valid


def test_decision_is_used_once_and_in_order(parties):
    ledger = parties.create_ledger()
    generous, strict = LedgerBudget(epsilon=20.0, delta=1e-5), LedgerBudget(epsilon=1.0, delta=1e-5)
    approval = StudyApproved(study_hash=STUDY_HASH)
    first = sign_decision(parties.officer, generous, ledger.id, ledger.head)
    held_back = sign_decision(parties.officer, approval, ledger.id, ledger.head)
    ledger.append(generous, first)
    ledger.append(strict, parties.officer)
    assert_refused(ledger, generous, first, "let the officer see the ledger's head and sign again")
    assert_refused(ledger, approval, held_back, "sign again")
    assert_refused(ledger, strict, first, "the officer's signature is not valid")
    assert ledger.budget == strict


def test_decision_is_for_one_ledger(parties, tmp_path):
    ledger = parties.create_ledger()
    other = LedgerParties(tmp_path / "other", parties.agent, parties.officer).create_ledger()
    approval = StudyApproved(study_hash=STUDY_HASH)
    decision = sign_decision(parties.officer, approval, other.id, ledger.head)
    assert_refused(ledger, approval, decision, "the officer's signature is not valid")


def test_clock_may_go_back_by_hours_but_not_by_days(parties):
    now = datetime(2025, 3, 1, 12, tzinfo=UTC)
    parties.clock = lambda: now
    ledger = parties.create_ledger()
    now -= timedelta(hours=23)
    ledger.append(DATASET)
    now -= timedelta(hours=2)  # 25 in all
    assert_refused(ledger, DATASET, match="goes back in time, from 2025-03-01T12:00:00")


def test_officer_signs_after_a_clock_that_was_ahead(parties):
    now = datetime(2099, 3, 1, 12, tzinfo=UTC)
    parties.clock = lambda: now
    ledger = parties.create_ledger()
    now = datetime(2025, 3, 1, 12, tzinfo=UTC)
    assert_refused(ledger, DATASET, match="let the officer sign the next entry")
    ledger.append(ledger.budget, parties.officer)
    ledger.append(DATASET)
    assert verify_ledger(parties.path).is_valid
