"""Charges: receipt before the next one, budget, delta, privacy unit, and valid numbers."""

import pytest
from pydantic import ValidationError

from privacy.ledger.records import ChargeRefused, DatasetSnapshot, LedgerBudget, LedgerReceipt
from tests.support.ledger_factory import DATASET, LedgerParties, assert_refused, make_charge, make_commitment


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


def test_charge_waits_for_the_receipt_of_the_previous_one(parties):
    ledger = parties.create_ledger()
    ledger.append(make_charge(0, 0.5))
    ledger.append(DATASET)
    message = "follows the charge of entry 1, which has no receipt"
    assert_refused(ledger, make_charge(0, 0.9, attempt=1), match=message)
    parties.append_receipt(ledger)
    ledger.append(make_charge(0, 0.9, attempt=1))


def test_older_receipt_does_not_cover_a_newer_charge(parties):
    ledger = parties.create_ledger()
    old_receipt = parties.append_receipt(ledger)
    ledger.append(make_charge(0, 0.5))
    ledger.append(old_receipt)
    assert_refused(ledger, make_charge(1, 0.9), match="has no receipt")


def test_charge_beyond_the_budget_is_refused(parties):
    ledger = parties.create_ledger(budget=LedgerBudget(epsilon=2.0, delta=1e-5))
    assert_refused(ledger, make_charge(0, 2.01), match=r"exceeds the budget: epsilon 2\.01 of 2")
    assert_refused(ledger, make_charge(0, 1.0, delta=1e-3), match=r"delta 0\.001, and the budget has 1e-05")
    ledger.append(ChargeRefused(study="anaemia", round=0, reason="epsilon 2.01 of 2"))
    ledger.append(make_charge(0, 2.0))


def test_another_privacy_unit_is_refused(parties):
    ledger = parties.create_ledger()
    message = "its privacy unit is the cell, and this ledger's is the patient"
    assert_refused(ledger, make_charge(0, 1.0, privacy_unit="cell"), match=message)
    assert_refused(ledger, make_commitment(privacy_unit="slide"), match="the slide")


def test_new_dataset_fingerprint_resets_nothing(parties):
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 1.5)
    ledger.append(DatasetSnapshot(fingerprint="sha256:new", num_units=5000, num_examples=10**5))
    assert [c.total_epsilon for c in parties.open_ledger().list_charges()] == [1.5]


@pytest.mark.parametrize(
    "field",
    [
        {"noise_multiplier": float("nan")},
        {"total_epsilon": float("inf")},
        {"steps": 0},
        {"sampling_rate": 1.5},
        {"round": -1},
        {"study": ""},
        {"steps": 1.5},
        {"colour": "red"},
    ],
)
def test_charge_with_invalid_numbers_is_refused(field):
    make_charge(0, 1.0)
    (name,) = field
    with pytest.raises(ValidationError, match=name):
        make_charge(**({"round_number": 0, "epsilon": 1.0} | field))


@pytest.mark.parametrize(
    "change", [{"head": "0" * 64}, {"index": 99}, {"site": "elsewhere"}, {"time": "2031-01-01T00:00:00+00:00"}]
)
def test_receipt_that_was_changed_is_refused(parties, change):
    ledger = parties.create_ledger()
    receipt = parties.append_receipt(ledger)
    assert_refused(ledger, LedgerReceipt(**(receipt.model_dump() | change)), match="receipt")
