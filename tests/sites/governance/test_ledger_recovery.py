"""Ledger recovery: the coordinator accepts the new ledger, and lost charges are estimated."""

import re
import shutil

import pytest

from pipeline.core.errors import LedgerError, RunFolderError
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.entry import LedgerPosition
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.receipts import check_receipt, create_receipt_request
from privacy.ledger.records import CarriedCharges, CosignerPolicy, LedgerBudget
from privacy.ledger.verify import verify_ledger
from sites.governance.backup import backup_home, restore_home
from sites.governance.home import SiteHome
from sites.governance.ledger_recovery import recover_ledger
from sites.governance.study_summary import total_spent_epsilon
from sites.governance.withdrawn_units import WITHDRAWN_UNITS_FILE
from tests.support.hospital import Hospital
from tests.support.ledger_factory import make_charge, make_commitment

REFUSAL_PATTERN = re.compile(r"continues ledger (\w+) from entry (\d+), head (\w+)")


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


@pytest.fixture
def countersigner(hospital, tmp_path):
    return LedgerCountersigner(tmp_path / "receipts", hospital.coordinator)


def append_receipt(hospital, countersigner, home):
    key = public_hex(hospital.coordinator)
    receipt = countersigner.countersign(create_receipt_request(home.ledger, home.agent_key, key))
    check_receipt(receipt, home.ledger, key)
    home.ledger.append(receipt)


def charge_rounds(hospital, countersigner, rounds):
    home = hospital.home
    for round_number in rounds:
        home.ledger.append(make_charge(round_number, 0.1 + 0.01 * round_number))
        append_receipt(hospital, countersigner, home)


def refused_position(hospital, countersigner, home):
    """The ledger id and the end position in the coordinator's error message."""
    home.ledger.append(make_charge(9, 0.5))
    with pytest.raises(LedgerError, match="is older than") as raised:
        append_receipt(hospital, countersigner, home)
    ledger_id, index, head = REFUSAL_PATTERN.search(str(raised.value)).groups()
    return ledger_id, LedgerPosition(int(index), head)


def test_recovery_from_a_backup_is_accepted_by_the_coordinator(hospital, countersigner, tmp_path):
    hospital.home.ledger.append(make_commitment())
    charge_rounds(hospital, countersigner, range(2))
    backup_home(hospital.path, tmp_path / "copy.tar")
    charge_rounds(hospital, countersigner, range(2, 5))
    spent = total_spent_epsilon(hospital.home)
    shutil.rmtree(hospital.path)
    restore_home(tmp_path / "copy.tar", hospital.path)
    ledger_id, end = refused_position(hospital, countersigner, hospital.home)
    recovery = recover_ledger(hospital.path, hospital.officer, end, ledger_id)
    assert (end.index, recovery.num_missing_entries, len(recovery.lost_charges)) == (
        10,
        6,
        3,
    )  # charges 6, 8, 10; the copy's last receipt is for entry 4
    assert recovery.old_ledger_path.name == f"ledger-{ledger_id[:8]}.jsonl"
    home = hospital.home
    assert home.ledger.state.opening.previous_ledger.ledger_id == ledger_id
    assert len(home.ledger.list_charges()) == 2 + 1 + 3  # the copy's, the refused one, the estimated ones
    assert total_spent_epsilon(home) > spent
    assert recovery.lost_charges[-1].total_epsilon == pytest.approx(total_spent_epsilon(home))
    append_receipt(hospital, countersigner, home)
    home.ledger.append(make_commitment())
    home.ledger.append(make_charge(5, 0.6))
    append_receipt(hospital, countersigner, home)
    assert verify_ledger(hospital.path / "ledger.jsonl", countersigner.last_receipt("st-anne", "smears-2024")).is_valid


def test_lost_charges_and_epsilon_stated_by_the_officer(hospital, countersigner, tmp_path):
    hospital.home.ledger.append(make_commitment())
    charge_rounds(hospital, countersigner, range(1))
    shutil.copytree(hospital.path, tmp_path / "copy")
    charge_rounds(hospital, countersigner, range(1, 4))
    end = LedgerPosition(*[(e.index, e.hash) for e in hospital.home.ledger.entries("charge")][-1])
    recovery = recover_ledger(tmp_path / "copy", hospital.officer, end, num_lost_charges=1, lost_epsilon=0.5)
    known, unknown = recovery.lost_charges
    assert known.study_hash == "5f" * 32
    assert unknown.study == "unknown"
    (carried,) = (entry.record for entry in recovery.ledger.entries("carried_charges"))
    assert isinstance(carried, CarriedCharges)
    assert "charges among them: 1, stated by the officer (at most 3)" in carried.note
    assert "unknown studies: epsilon 0.5" in carried.note
    assert 0.5 < total_spent_epsilon(SiteHome.open(tmp_path / "copy")) < 8
    with pytest.raises(RunFolderError, match="must not be negative"):
        recover_ledger(tmp_path / "copy", hospital.officer, num_lost_charges=-1)


def test_a_ledger_can_be_recovered_twice(hospital):
    hospital.home.ledger.append(make_commitment())
    hospital.home.ledger.append(make_charge(0, 0.2))
    for _ in range(2):
        recovery = recover_ledger(hospital.path, hospital.officer, num_lost_charges=0, lost_epsilon=0.5)
        assert len(recovery.lost_charges) == 1
    assert len(hospital.home.ledger.list_charges()) == 3
    assert total_spent_epsilon(hospital.home) > 0.5
    assert len(list(hospital.path.glob("ledger-*.jsonl"))) == 2


def test_estimated_charges_stay_within_max_participations(hospital, tmp_path):
    """The second study had no charge when the copy was made."""
    ledger = hospital.home.ledger
    ledger.append(make_commitment(max_participations=2))
    ledger.append(make_commitment(study_hash="e1" * 32, study="malaria", max_participations=40))
    ledger.append(make_charge(0, 0.2))
    end = LedgerPosition(20, "ab" * 32)
    recovery = recover_ledger(hospital.path, hospital.officer, end)
    assert recovery.num_missing_entries == 20
    assert [lost.study for lost in recovery.lost_charges] == ["anaemia"] + ["malaria"] * 10


def test_recovery_carries_over_budget_withdrawals_and_cosigner(hospital):
    """But no approvals."""
    home, cosigner, offer = hospital.home, generate_key(), hospital.make_offer()
    hospital.approve(offer)
    home.withdraw_unit("patient 1")
    home.ledger.append(LedgerBudget(epsilon=3.0, delta=1e-5), hospital.officer)
    home.ledger.append(CosignerPolicy(cosigner_key=public_hex(cosigner)), hospital.officer)
    (hospital.path / WITHDRAWN_UNITS_FILE).unlink()
    new_officer = generate_key()
    recover_ledger(hospital.path, new_officer)  # the officer's old key is lost
    home = hospital.home
    assert home.ledger.budget.epsilon == 3
    assert home.ledger.state.opening.budget.epsilon == 8
    assert home.ledger.state.cosigner_key == public_hex(cosigner)
    assert home.ledger.state.keys.officer_key == public_hex(new_officer)
    assert home.retained_mask(["patient 1", "patient 2"]) == [False, True]
    assert not home.ledger.entries("study_approved")
    recover_ledger(hospital.path, new_officer, drop_cosigner=True)
    assert hospital.home.ledger.state.cosigner_key is None


def test_recovery_after_the_agent_key_was_revoked(hospital):
    ledger, stolen = hospital.home.ledger, public_hex(hospital.home.agent_key)
    ledger.append(make_commitment())
    ledger.append(make_charge(0, 0.2))
    ledger.revoke_agent_key(hospital.officer, last_trusted_index=1, reason="the laptop was stolen")
    with pytest.raises(LedgerError, match="this ledger is closed"):
        _ = hospital.home
    recovery = recover_ledger(hospital.path, hospital.officer)
    assert recovery.problems
    assert public_hex(hospital.home.agent_key) != stolen
    assert hospital.home.ledger.state.keys.agent_keys == (public_hex(hospital.home.agent_key),)
    assert len(hospital.home.ledger.list_charges()) == 1  # the disputed charge still counts


def test_recovery_refuses_another_ledger_id(hospital, tmp_path):
    before = (hospital.path / "ledger.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="restore a backup of that one first"):
        recover_ledger(hospital.path, hospital.officer, LedgerPosition(3, "ab" * 32), "cd" * 32)
    assert (hospital.path / "ledger.jsonl").read_bytes() == before
    assert not list(hospital.path.glob("ledger-*"))
