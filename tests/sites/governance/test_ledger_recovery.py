"""A ledger that continues an older copy: the coordinator takes it, and what may have been spent meanwhile is reckoned."""

import re
import shutil

import pytest

from pipeline.core.errors import BadLedger, BadRun
from privacy.ledger.countersigner import Countersigner
from privacy.ledger.entry import Mark
from privacy.ledger.keys import generate, public_hex
from privacy.ledger.receipts import check_receipt, request
from privacy.ledger.records import Budget, Carried, Policy
from privacy.ledger.verify import verify
from sites.governance.backup import backup, restore
from sites.governance.home import Home
from sites.governance.ledger_recovery import continue_ledger
from sites.governance.study_summary import spent_so_far
from tests.support.hospital import Hospital
from tests.support.ledger_factory import charge, commit

TOLD = re.compile(r"continues ledger (\w+) from entry (\d+), head (\w+)")


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


@pytest.fixture
def desk(hospital, tmp_path):
    return Countersigner(tmp_path / "receipts", hospital.coordinator)


def receipted(hospital, desk, home):
    key = public_hex(hospital.coordinator)
    receipt = desk.countersign(request(home.ledger, home.key, key))
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
    with pytest.raises(BadLedger, match="is older than") as told:
        receipted(hospital, desk, home)
    ledger, index, head = TOLD.search(str(told.value)).groups()
    return ledger, Mark(int(index), head)


def test_from_a_backup_to_a_ledger_that_is_taken(hospital, desk, tmp_path):
    hospital.home.ledger.append(commit())
    train(hospital, desk, range(2))
    backup(hospital.path, tmp_path / "copy.tar")
    train(hospital, desk, range(2, 5))
    spent = spent_so_far(hospital.home)
    shutil.rmtree(hospital.path)
    restore(tmp_path / "copy.tar", hospital.path)
    ledger, end = refused(hospital, desk, hospital.home)
    made = continue_ledger(hospital.path, hospital.officer, end, ledger)
    assert (end.index, made.missing, len(made.lost)) == (10, 6, 3)  # charges 6, 8, 10; the copy's last receipt is for 4
    assert made.aside.name == f"ledger-{ledger[:8]}.jsonl"
    home = hospital.home
    assert home.ledger.standing.opening.continues.ledger == ledger
    assert len(home.ledger.spent_events()) == 2 + 1 + 3  # the copy's, the one that was refused, the reckoned
    assert spent_so_far(home) > spent
    assert made.lost[-1].epsilon == pytest.approx(spent_so_far(home))
    receipted(hospital, desk, home)
    home.ledger.append(commit())
    home.ledger.append(charge(5, 0.6))
    receipted(hospital, desk, home)
    assert verify(hospital.path / "ledger.jsonl", desk.last("st-anne", "smears-2024")).ok


def test_the_officer_may_know_better(hospital, desk, tmp_path):
    hospital.home.ledger.append(commit())
    train(hospital, desk, range(1))
    shutil.copytree(hospital.path, tmp_path / "copy")
    train(hospital, desk, range(1, 4))
    end = Mark(*[(e.index, e.hash) for e in hospital.home.ledger.entries("charge")][-1])
    made = continue_ledger(tmp_path / "copy", hospital.officer, end, lost=1, lost_epsilon=0.5)
    known, unknown = made.lost
    assert known.plan == "5f" * 32
    assert unknown.study == "unknown"
    (carried,) = (entry.what for entry in made.ledger.entries("carried"))
    assert isinstance(carried, Carried)
    assert "charges: 1, as the officer says (at most 3)" in carried.note
    assert "unknown studies: epsilon 0.5" in carried.note
    assert 0.5 < spent_so_far(Home.open(tmp_path / "copy")) < 8
    with pytest.raises(BadRun, match="less than nothing"):
        continue_ledger(tmp_path / "copy", hospital.officer, lost=-1)


def test_twice_continued_it_can_still_be_reckoned(hospital):
    hospital.home.ledger.append(commit())
    hospital.home.ledger.append(charge(0, 0.2))
    for _ in range(2):
        made = continue_ledger(hospital.path, hospital.officer, lost=0, lost_epsilon=0.5)
        assert len(made.lost) == 1
    assert len(hospital.home.ledger.spent_events()) == 3
    assert spent_so_far(hospital.home) > 0.5
    assert len(list(hospital.path.glob("ledger-*.jsonl"))) == 2


def test_a_plan_is_not_reckoned_beyond_its_turns(hospital, tmp_path):
    """Also of one that had not begun when the copy was made."""
    ledger = hospital.home.ledger
    ledger.append(commit(turns=2))
    ledger.append(commit(plan="e1" * 32, study="malaria", turns=40))
    ledger.append(charge(0, 0.2))
    end = Mark(20, "ab" * 32)
    made = continue_ledger(hospital.path, hospital.officer, end)
    assert made.missing == 20
    assert [lost.study for lost in made.lost] == ["anaemia"] + ["malaria"] * 10


def test_what_is_carried_over(hospital):
    """Budgets, withdrawn patients and the second person; not approvals."""
    home, second, offer = hospital.home, generate(), hospital.offer()
    hospital.approve(offer)
    home.forget("patient 1")
    home.ledger.append(Budget(epsilon=3.0, delta=1e-5), hospital.officer)
    home.ledger.append(Policy(second=public_hex(second)), hospital.officer)
    (hospital.path / "forgotten.json").unlink()
    new = generate()
    continue_ledger(hospital.path, new)  # the officer's old key is lost
    home = hospital.home
    assert home.ledger.budget.epsilon == 3
    assert home.ledger.standing.opening.budget.epsilon == 8
    assert home.ledger.standing.second == public_hex(second)
    assert home.ledger.standing.keys.officer == public_hex(new)
    assert home.remaining(["patient 1", "patient 2"]) == [False, True]
    assert not home.ledger.entries("approve")
    continue_ledger(hospital.path, new, drop_second=True)
    assert hospital.home.ledger.standing.second is None


def test_a_ledger_that_the_officer_closed_goes_on(hospital):
    ledger, stolen = hospital.home.ledger, public_hex(hospital.home.key)
    ledger.append(commit())
    ledger.append(charge(0, 0.2))
    ledger.revoke(hospital.officer, after=1, reason="the laptop was stolen")
    with pytest.raises(BadLedger, match="this ledger is closed"):
        _ = hospital.home
    made = continue_ledger(hospital.path, hospital.officer)
    assert made.problems
    assert public_hex(hospital.home.key) != stolen
    assert hospital.home.ledger.standing.keys.agents == (public_hex(hospital.home.key),)
    assert len(hospital.home.ledger.spent_events()) == 1  # a doubt refunds nothing


def test_another_ledger_is_not_continued(hospital, tmp_path):
    before = (hospital.path / "ledger.jsonl").read_bytes()
    with pytest.raises(BadRun, match="restore a backup of that one first"):
        continue_ledger(hospital.path, hospital.officer, Mark(3, "ab" * 32), "cd" * 32)
    assert (hospital.path / "ledger.jsonl").read_bytes() == before
    assert not list(hospital.path.glob("ledger-*"))
