"""A ledger that continues an older copy: the coordinator takes it, and what may have been spent meanwhile is reckoned."""

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
from tests.support.hospital import Hospital
from tests.support.ledger_factory import charge, commit

TOLD = re.compile(r"continues ledger (\w+) from entry (\d+), head (\w+)")


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


@pytest.fixture
def desk(hospital, tmp_path):
    return LedgerCountersigner(tmp_path / "receipts", hospital.coordinator)


def receipted(hospital, desk, home):
    key = public_hex(hospital.coordinator)
    receipt = desk.countersign(create_receipt_request(home.ledger, home.key, key))
    check_receipt(receipt, home.ledger, key)
    home.ledger.append(receipt)


def train(hospital, desk, turns, plan="5f" * 32):
    home = hospital.home
    for turn in turns:
        home.ledger.append(charge(turn, 0.1 + 0.01 * turn, plan=plan))
        receipted(hospital, desk, home)


def refused(hospital, desk, home):
    """Where the coordinator says that the ledger ended."""
    home.ledger.append(charge(9, 0.5))
    with pytest.raises(LedgerError, match="is older than") as told:
        receipted(hospital, desk, home)
    ledger, index, head = TOLD.search(str(told.value)).groups()
    return ledger, LedgerPosition(int(index), head)


def test_from_a_backup_to_a_ledger_that_is_taken(hospital, desk, tmp_path):
    hospital.home.ledger.append(commit())
    train(hospital, desk, range(2))
    backup_home(hospital.path, tmp_path / "copy.tar")
    train(hospital, desk, range(2, 5))
    spent = total_spent_epsilon(hospital.home)
    shutil.rmtree(hospital.path)
    restore_home(tmp_path / "copy.tar", hospital.path)
    ledger, end = refused(hospital, desk, hospital.home)
    made = recover_ledger(hospital.path, hospital.officer, end, ledger)
    assert (end.index, made.num_missing_entries, len(made.lost_charges)) == (
        10,
        6,
        3,
    )  # charges 6, 8, 10; the copy's last receipt is for 4
    assert made.old_ledger_path.name == f"ledger-{ledger[:8]}.jsonl"
    home = hospital.home
    assert home.ledger.state.opening.previous_ledger.ledger == ledger
    assert len(home.ledger.spent_events()) == 2 + 1 + 3  # the copy's, the one that was refused, the reckoned
    assert total_spent_epsilon(home) > spent
    assert made.lost_charges[-1].total_epsilon == pytest.approx(total_spent_epsilon(home))
    receipted(hospital, desk, home)
    home.ledger.append(commit())
    home.ledger.append(charge(5, 0.6))
    receipted(hospital, desk, home)
    assert verify_ledger(hospital.path / "ledger.jsonl", desk.last("st-anne", "smears-2024")).is_valid


def test_the_officer_may_know_better(hospital, desk, tmp_path):
    hospital.home.ledger.append(commit())
    train(hospital, desk, range(1))
    shutil.copytree(hospital.path, tmp_path / "copy")
    train(hospital, desk, range(1, 4))
    end = LedgerPosition(*[(e.index, e.hash) for e in hospital.home.ledger.entries("charge")][-1])
    made = recover_ledger(tmp_path / "copy", hospital.officer, end, num_lost_charges=1, lost_epsilon=0.5)
    known, unknown = made.lost_charges
    assert known.study_hash == "5f" * 32
    assert unknown.study == "unknown"
    (carried,) = (entry.record for entry in made.ledger.entries("carried"))
    assert isinstance(carried, CarriedCharges)
    assert "charges: 1, as the officer says (at most 3)" in carried.note
    assert "unknown studies: epsilon 0.5" in carried.note
    assert 0.5 < total_spent_epsilon(SiteHome.open(tmp_path / "copy")) < 8
    with pytest.raises(RunFolderError, match="less than nothing"):
        recover_ledger(tmp_path / "copy", hospital.officer, num_lost_charges=-1)


def test_twice_continued_it_can_still_be_reckoned(hospital):
    hospital.home.ledger.append(commit())
    hospital.home.ledger.append(charge(0, 0.2))
    for _ in range(2):
        made = recover_ledger(hospital.path, hospital.officer, num_lost_charges=0, lost_epsilon=0.5)
        assert len(made.lost_charges) == 1
    assert len(hospital.home.ledger.spent_events()) == 3
    assert total_spent_epsilon(hospital.home) > 0.5
    assert len(list(hospital.path.glob("ledger-*.jsonl"))) == 2


def test_a_plan_is_not_reckoned_beyond_its_turns(hospital, tmp_path):
    """Also of one that had not begun when the copy was made."""
    ledger = hospital.home.ledger
    ledger.append(commit(turns=2))
    ledger.append(commit(plan="e1" * 32, study="malaria", turns=40))
    ledger.append(charge(0, 0.2))
    end = LedgerPosition(20, "ab" * 32)
    made = recover_ledger(hospital.path, hospital.officer, end)
    assert made.num_missing_entries == 20
    assert [lost.study for lost in made.lost_charges] == ["anaemia"] + ["malaria"] * 10


def test_what_is_carried_over(hospital):
    """Budgets, withdrawn patients and the second person; not approvals."""
    home, second, offer = hospital.home, generate_key(), hospital.offer()
    hospital.approve(offer)
    home.withdraw_unit("patient 1")
    home.ledger.append(LedgerBudget(epsilon=3.0, delta=1e-5), hospital.officer)
    home.ledger.append(CosignerPolicy(cosigner_key=public_hex(second)), hospital.officer)
    (hospital.path / "forgotten.json").unlink()
    new = generate_key()
    recover_ledger(hospital.path, new)  # the officer's old key is lost
    home = hospital.home
    assert home.ledger.budget.epsilon == 3
    assert home.ledger.state.opening.budget.epsilon == 8
    assert home.ledger.state.second == public_hex(second)
    assert home.ledger.state.keys.officer == public_hex(new)
    assert home.retained_mask(["patient 1", "patient 2"]) == [False, True]
    assert not home.ledger.entries("approve")
    recover_ledger(hospital.path, new, drop_cosigner=True)
    assert hospital.home.ledger.state.second is None


def test_a_ledger_that_the_officer_closed_goes_on(hospital):
    ledger, stolen = hospital.home.ledger, public_hex(hospital.home.key)
    ledger.append(commit())
    ledger.append(charge(0, 0.2))
    ledger.revoke_agent_key(hospital.officer, after=1, reason="the laptop was stolen")
    with pytest.raises(LedgerError, match="this ledger is closed"):
        _ = hospital.home
    made = recover_ledger(hospital.path, hospital.officer)
    assert made.problems
    assert public_hex(hospital.home.key) != stolen
    assert hospital.home.ledger.state.keys.agent_keys == (public_hex(hospital.home.key),)
    assert len(hospital.home.ledger.spent_events()) == 1  # a doubt refunds nothing


def test_another_ledger_is_not_continued(hospital, tmp_path):
    before = (hospital.path / "ledger.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="restore a backup of that one first"):
        recover_ledger(hospital.path, hospital.officer, LedgerPosition(3, "ab" * 32), "cd" * 32)
    assert (hospital.path / "ledger.jsonl").read_bytes() == before
    assert not list(hospital.path.glob("ledger-*"))
