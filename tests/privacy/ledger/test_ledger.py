"""The ledger's file: what may be added and by whom, two writers, crashes, full disks, clocks and changes of keys."""

import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import ValidationError

from pipeline.core.errors import LedgerError, NoSpaceError
from privacy.ledger.entry import sign_decision
from privacy.ledger.keys import generate_key, public_hex, save_key
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import (
    ApprovalRevoked,
    CarriedCharges,
    ChargeRefused,
    CosignerPolicy,
    DatasetSnapshot,
    LedgerBudget,
    LedgerReceipt,
    StudyApproved,
    UnitWithdrawn,
    pseudonymize_unit,
)
from privacy.ledger.signatures import lost_key_rotation, officer_key_rotation, routine_rotation
from privacy.ledger.summary import continuation_records
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import World, a_year, charge, commit, fill, small_disk

DATA = DatasetSnapshot(fingerprint="sha256:9c0d", num_units=812, num_examples=20140)
PLAN = "5f" * 32


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def refused(ledger, body, officer=None, match=""):
    """Refused with these words, and nothing is written."""
    before = ledger.path.read_bytes()
    with pytest.raises(LedgerError, match=match):
        ledger.append(body, officer)
    assert ledger.path.read_bytes() == before
    assert verify_ledger(ledger.path).is_valid


# What stands in the file


def test_a_line_by_hand(world):
    """With hashlib, json and openssl alone: head = SHA-256(head before || digest), and the signature is under the head."""
    ledger = world.create()
    entry = ledger.append(DATA)
    first, second = (json.loads(line) for line in world.path.read_bytes().splitlines())
    said = {key: value for key, value in second.items() if key not in ("hash", "signature")}
    digest = hashlib.sha256(
        json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    ).digest()
    assert second["before"] == first["hash"]
    assert (
        second["hash"] == hashlib.sha256(bytes.fromhex(first["hash"]) + digest).hexdigest() == ledger.head == entry.hash
    )
    assert ledger.digests(1) == [digest.hex()]
    message, signature, public = (world.folder / name for name in ("message", "signature", "public.pem"))
    message.write_bytes(b'hemofed/1/entry\n"' + second["hash"].encode() + b'"')
    signature.write_bytes(bytes.fromhex(second["signature"]))
    public.write_bytes(world.agent.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    said = subprocess.run(
        ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", message, "-sigfile", signature],
        capture_output=True,
        text=True,
    )
    assert "Verified Successfully" in said.stdout, said


def test_a_ledger_comes_back_as_it_was_left(world):
    a_year(world)
    ledger = world.reopen()
    assert verify_ledger(world.path).is_valid
    assert ledger.index == 30
    assert ledger.budget == LedgerBudget(epsilon=9.0, delta=1e-5)
    assert [c.epsilon for c in ledger.spent_events()] == pytest.approx([0.4, 0.7, 1.0, 1.3, 1.6, 1.9, 2.25, 2.5])
    assert [e.kind for e in ledger.entries()][:6] == ["open", "data", "approve", "commit", "charge", "receipt"]
    assert len(ledger.entries("charge")) == 8


def test_no_id_of_a_patient_is_in_the_file(world):
    ledger = world.create()
    ledger.append(UnitWithdrawn(unit_pseudonym=pseudonymize_unit(b"salt of 16 bytes", "4711")))
    assert b"4711" not in world.path.read_bytes()
    assert pseudonymize_unit(b"salt of 16 bytes", "4711") != pseudonymize_unit(b"another 16 bytes", "4711")


def test_a_pseudonym_is_the_hmac_of_rfc_4231():
    assert (
        pseudonymize_unit(b"\x0b" * 20, "Hi There")
        == "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"
    )


def test_equal_entries_have_unequal_digests(world):
    """So that a coordinator cannot try out what a digest might stand for."""
    ledger = world.create()
    entries = [ledger.append(DATA) for _ in range(2)]
    assert entries[0].salt != entries[1].salt
    assert len(bytes.fromhex(entries[0].salt)) == 16


def test_an_entry_is_frozen(world):
    entry = world.create().entries()[0]
    with pytest.raises(FrozenInstanceError):
        entry.index = 3
    with pytest.raises(ValidationError):
        entry.what.site = "elsewhere"


def test_a_ledger_is_opened_once(world):
    world.create()
    before = world.path.read_bytes()
    with pytest.raises(LedgerError, match="opened once"):
        world.create()
    assert world.path.read_bytes() == before


def test_a_ledger_that_is_not_there_or_empty_is_named(world):
    with pytest.raises(LedgerError, match=r"ledger\.jsonl cannot be opened: No such file"):
        Ledger.open(world.path)
    world.path.touch()
    with pytest.raises(LedgerError, match="holds no entry"):
        Ledger.open(world.path)
    world.create()


def test_without_the_key_it_is_read_only(world):
    world.create()
    ledger = Ledger.open(world.path)
    refused(ledger, DATA, match="opened to read")
    with pytest.raises(LedgerError, match="is written with key"):
        Ledger.open(world.path, generate_key())


# What the officer must sign


@pytest.mark.parametrize(
    "body",
    [StudyApproved(study_hash=PLAN), CosignerPolicy(cosigner_key="ab" * 32), LedgerBudget(epsilon=100.0, delta=1e-5)],
)
def test_what_only_the_officer_may_decide(world, body):
    ledger = world.create()
    refused(ledger, body, None, "for the officer to decide, and his signature is missing")
    refused(ledger, body, generate_key(), "is decided with key")
    refused(ledger, body, world.agent, "is decided with key")
    ledger.append(body, world.officer)
    assert verify_ledger(world.path).is_valid


def test_withdrawing_is_easy(world):
    """The agent may do it alone; but nobody in the officer's name."""
    ledger = world.create()
    refused(ledger, ApprovalRevoked(study_hash=PLAN), generate_key(), "is decided with key")
    ledger.append(ApprovalRevoked(study_hash=PLAN))
    ledger.append(ApprovalRevoked(study_hash=PLAN), world.officer)
    assert verify_ledger(world.path).is_valid


def test_opening_takes_the_officer(world):
    with pytest.raises(LedgerError, match="is decided with key"):
        Ledger.create(world.path, world.opening(), world.agent, generate_key())
    with pytest.raises(LedgerError, match="keys of their own"):
        Ledger.create(world.path, world.opening(officer=public_hex(world.agent)), world.agent, world.agent)
    with pytest.raises(LedgerError, match="is signed by key"):
        Ledger.create(world.path, world.opening(), generate_key(), world.officer)
    Ledger.create(world.path, world.opening(), world.agent, sign_decision(world.officer, world.opening()))
    assert verify_ledger(world.path).is_valid


def test_an_officer_signs_elsewhere_while_training_goes_on(world):
    ledger = world.create()
    body = LedgerBudget(epsilon=20.0, delta=1e-5)
    decision = sign_decision(world.officer, body, ledger.id, ledger.head)
    world.train(ledger, 0, 0.5)
    ledger.append(body, decision)
    assert ledger.budget.epsilon == 20
    assert verify_ledger(world.path).is_valid


def test_a_decision_is_used_once_and_in_its_order(world):
    ledger = world.create()
    generous, strict = LedgerBudget(epsilon=20.0, delta=1e-5), LedgerBudget(epsilon=1.0, delta=1e-5)
    first = sign_decision(world.officer, generous, ledger.id, ledger.head)
    held_back = sign_decision(world.officer, StudyApproved(study_hash=PLAN), ledger.id, ledger.head)
    ledger.append(generous, first)
    ledger.append(strict, world.officer)
    refused(ledger, generous, first, "let him see the ledger's head and sign again")
    refused(ledger, StudyApproved(study_hash=PLAN), held_back, "sign again")
    refused(ledger, strict, first, "the officer's signature does not fit")
    assert ledger.budget == strict


def test_a_decision_is_for_one_ledger(world, tmp_path):
    ledger = world.create()
    other = World(tmp_path / "other", world.agent, world.officer).create()
    body = StudyApproved(study_hash=PLAN)
    refused(ledger, body, sign_decision(world.officer, body, other.id, ledger.head), "does not fit")


# What may be charged


def test_charges_wait_for_the_receipt_of_the_one_before(world):
    ledger = world.create()
    ledger.append(charge(0, 0.5))
    ledger.append(DATA)
    refused(ledger, charge(0, 0.9, attempt=1), match="follows the charge of entry 1, which has no receipt")
    world.receipt(ledger)
    ledger.append(charge(0, 0.9, attempt=1))


def test_an_older_receipt_does_not_cover_a_newer_charge(world):
    ledger = world.create()
    old = world.receipt(ledger)
    ledger.append(charge(0, 0.5))
    ledger.append(old)
    refused(ledger, charge(1, 0.9), match="has no receipt")


def test_the_budget_holds(world):
    ledger = world.create(budget=LedgerBudget(epsilon=2.0, delta=1e-5))
    refused(ledger, charge(0, 2.01), match=r"passes the budget: epsilon 2\.01 of 2")
    refused(ledger, charge(0, 1.0, delta=1e-3), match=r"delta 0\.001, and the budget with 1e-05")
    ledger.append(ChargeRefused(study="anaemia", round=0, reason="epsilon 2.01 of 2"))
    ledger.append(charge(0, 2.0))


def test_another_unit_is_another_promise(world):
    ledger = world.create()
    refused(ledger, charge(0, 1.0, unit="cell"), match="its privacy unit is the cell, and this ledger's is the patient")
    refused(ledger, commit(unit="slide"), match="the slide")


def test_new_data_reset_nothing(world):
    ledger = world.create()
    world.train(ledger, 0, 1.5)
    ledger.append(DatasetSnapshot(fingerprint="sha256:new", num_units=5000, num_examples=10**5))
    assert [c.epsilon for c in world.reopen().spent_events()] == [1.5]


@pytest.mark.parametrize(
    "field",
    [
        {"noise": float("nan")},
        {"epsilon": float("inf")},
        {"steps": 0},
        {"rate": 1.5},
        {"turn": -1},
        {"study": ""},
        {"steps": 1.5},
        {"colour": "red"},
    ],
)
def test_a_charge_has_sensible_numbers(field):
    with pytest.raises(ValidationError):
        charge(**({"turn": 0, "epsilon": 1.0} | field))


@pytest.mark.parametrize(
    "change", [{"head": "0" * 64}, {"index": 99}, {"site": "elsewhere"}, {"time": "2031-01-01T00:00:00+00:00"}]
)
def test_a_receipt_must_fit(world, change):
    ledger = world.create()
    receipt = world.receipt(ledger)
    refused(ledger, LedgerReceipt(**(receipt.model_dump() | change)), match="receipt")


# Clocks


def test_a_clock_may_be_set_back_by_hours_but_not_by_days(world):
    now = datetime(2025, 3, 1, 12, tzinfo=UTC)
    world.clock = lambda: now
    ledger = world.create()
    now -= timedelta(hours=23)
    ledger.append(DATA)
    now -= timedelta(hours=2)  # 25 in all
    refused(ledger, DATA, match="goes back in time, from 2025-03-01T12:00:00")


def test_the_officer_signs_after_a_clock_that_was_ahead(world):
    now = datetime(2099, 3, 1, 12, tzinfo=UTC)
    world.clock = lambda: now
    ledger = world.create()
    now = datetime(2025, 3, 1, 12, tzinfo=UTC)
    refused(ledger, DATA, match="let the officer sign the next entry")
    ledger.append(ledger.budget, world.officer)
    ledger.append(DATA)
    assert verify_ledger(world.path).is_valid


# Several writers

WRITER = """
import sys
from pathlib import Path
from privacy.ledger.records import Data
from privacy.ledger.keys import load
from privacy.ledger.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]), load(Path(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
for at in range(int(sys.argv[3])):
    ledger.append(Data(fingerprint=sys.argv[4], units=at, examples=at))
    print(at, flush=True)
"""


def writer(world, times, name):
    key = world.folder / "agent.pem"
    if not key.exists():
        save_key(world.agent, key)
    command = [sys.executable, "-c", WRITER, str(world.path), str(key), str(times), name]
    root = str(Path(__file__).parents[3])
    return subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_take_turns(world):
    world.clock = lambda: datetime.now(UTC)
    ledger = world.create()
    writers = [writer(world, 40, name) for name in "ab"]
    assert [w.stdout.readline() for w in writers] == ["ready\n"] * 2
    for w in writers:
        w.stdin.write("go\n")
        w.stdin.flush()
    for at in range(10):
        ledger.append(DatasetSnapshot(fingerprint="here", num_units=at, num_examples=at))
    assert [w.wait() for w in writers] == [0, 0]
    for w in writers:
        w.communicate()
    said = [e.record for e in Ledger.open(world.path).entries("data")]
    assert verify_ledger(world.path).is_valid
    assert len(said) == 90
    assert [d.units for d in said if d.fingerprint == "a"] == list(range(40))  # each in its own order
    assert ledger.append(DATA).index == 91


def test_a_charge_that_was_reckoned_without_another_is_refused(world):
    """Otherwise two agents could each spend the rest of the budget."""
    one = world.create()
    two = world.reopen()
    world.train(two, 0, 5.0)
    before = world.path.read_bytes()
    with pytest.raises(LedgerError, match="reckon the charge again"):
        one.append(charge(0, 5.0))
    assert world.path.read_bytes() == before
    assert [c.epsilon for c in one.spent_events()] == [5.0]  # now it knows
    one.append(charge(1, 7.5))
    two.append(DATA)
    one.append(DATA)  # others need no reckoning
    assert verify_ledger(world.path).is_valid


def test_a_kill_loses_nothing_that_was_announced(world):
    world.clock = lambda: datetime.now(UTC)
    world.create()
    w = writer(world, 10**6, "a")
    w.stdout.readline()
    w.stdin.write("go\n")
    w.stdin.flush()
    last = [w.stdout.readline() for _ in range(50)][-1]
    w.send_signal(signal.SIGKILL)
    announced = [last, *w.communicate()[0].splitlines()]
    ledger = world.reopen()
    assert ledger.index >= 1 + int(announced[-1])
    ledger.append(DATA)
    assert verify_ledger(world.path).is_valid


def test_a_backup_restored_under_a_running_agent_is_noticed(world):
    ledger = world.create()
    backup = world.path.read_bytes()
    ledger.append(DATA)
    world.path.write_bytes(backup)
    with pytest.raises(LedgerError, match="was replaced while it was open"):
        ledger.append(DATA)


# Crashes and full disks


def test_a_torn_line_is_moved_aside(world):
    ledger = world.create()
    ledger.append(DATA)
    whole = world.path.read_bytes()
    line = ledger.append(DATA).line()
    for n, length in enumerate((1, 2, 300, len(line) - 2), start=1):
        world.path.write_bytes(whole + line[:length])
        assert not verify_ledger(world.path).is_valid
        looked = Ledger.open(world.path)
        assert (looked.last_index, looked.torn_line_path) == (1, None)
        assert world.path.read_bytes() == whole + line[:length]  # a reader mends nothing
        mended = world.reopen()
        assert mended.torn_line_path == world.folder / f"ledger.torn-{n}"
        assert mended.torn_line_path.read_bytes() == line[:length]
        assert world.path.read_bytes() == whole
        assert mended.append(DATA).index == 2
        assert verify_ledger(world.path).is_valid


def test_zeros_after_a_power_cut_are_moved_aside(world):
    ledger = world.create()
    with world.path.open("ab") as file:
        file.write(bytes(200))
    assert ledger.append(DATA).index == 1
    assert ledger.torn_line_path.read_bytes() == bytes(200)
    assert verify_ledger(world.path).is_valid


def test_a_whole_line_that_lacks_only_its_end_is_kept(world):
    """An editor that drops the last line break must not refund a charge."""
    ledger = world.create()
    world.train(ledger, 0, 1.0)
    whole = world.path.read_bytes()
    world.path.write_bytes(whole[:-1])
    ledger = world.reopen()
    assert (ledger.torn, ledger.index) == (None, 2)
    assert world.path.read_bytes() == whole


def test_a_broken_line_in_the_middle_is_not_mended(world):
    ledger = world.create()
    ledger.append(DATA)
    lines = world.path.read_bytes().splitlines(keepends=True)
    world.path.write_bytes(lines[0] + lines[1][:100] + b"\n")
    with pytest.raises(LedgerError, match=r"line 2: it is no JSON.* restore the newest copy"):
        world.reopen()


def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path):
    with small_disk(tmp_path) as disk:
        world = World(disk)
        ledger = world.create()
        fill(disk)
        whole = []

        def go_on():
            while True:
                whole.append(world.path.read_bytes())
                ledger.append(DATA)

        with pytest.raises(NoSpaceError, match=r"no space left to write .*ledger\.jsonl"):
            go_on()
        assert world.path.read_bytes() == whole[-1]
        (disk / "filling").unlink()
        count = ledger.last_index
        assert ledger.append(DATA).index == count + 1
        assert ledger.torn_line_path is None
        assert verify_ledger(world.path).is_valid


# Changes of keys


def test_a_routine_rotation(world):
    ledger = world.create()
    old, new = world.agent, generate_key()
    ledger.rotate(new)
    assert ledger.append(DATA).key != ledger.entries()[0].key
    assert Ledger.open(world.path, new).last_index == 2
    with pytest.raises(LedgerError, match="load the agent's key"):
        Ledger.open(world.path, old)
    assert verify_ledger(world.path).is_valid


def test_the_new_key_must_be_in_hand(world):
    ledger = world.create()
    keys = ledger.state.keys
    stolen = routine_rotation(keys, world.agent, generate_key()).model_copy(
        update={"agent": public_hex(generate_key())}
    )
    refused(ledger, stolen, match="not proven to be in the agent's hands")
    refused(ledger, stolen.model_copy(update={"proof": None}), match="not proven")


def test_a_lost_key_is_replaced_by_the_officer(world):
    world.create()
    new = generate_key()
    Ledger.open(world.path).rotate_agent_key(new, world.officer)
    assert Ledger.open(world.path, new).append(DATA).index == 2
    assert verify_ledger(world.path).is_valid


def test_a_lost_key_is_not_replaced_by_anybody_else(world):
    ledger = world.create()
    thief = generate_key()
    for officer in (thief, world.agent, generate_key()):
        with pytest.raises(LedgerError, match="is decided with key"):
            Ledger.open(world.path).rotate_agent_key(thief, officer)
    refused(ledger, lost_key_rotation(thief), match="his signature is missing")
    with pytest.raises(LedgerError, match="needs the old key"):
        Ledger.open(world.path).rotate_agent_key(thief)
    assert ledger.index == 0


def test_after_a_revocation_only_the_officer_goes_on(world):
    ledger = world.create()
    ledger.append(DATA)
    Ledger.open(world.path).revoke_agent_key(world.officer, last_trusted_index=1, reason="stolen")
    refused(ledger, DATA, match="only a rotation of the lost key may")
    with pytest.raises(LedgerError, match="comes after a revocation"):
        ledger.rotate(generate_key())  # the thief, by the stolen key
    new = generate_key()
    Ledger.open(world.path).rotate_agent_key(new, world.officer)
    assert Ledger.open(world.path, new).append(DATA).index == 4
    with pytest.raises(LedgerError, match="is signed by key"):
        ledger.append(DATA)  # the thief, still
    assert verify_ledger(world.path).is_valid


def test_only_the_officer_revokes(world):
    ledger = world.create()
    for somebody in (world.agent, generate_key()):
        with pytest.raises(LedgerError, match="and the officer's key is"):
            ledger.revoke_agent_key(somebody, after=0)
    with pytest.raises(LedgerError, match="never was the agent's key"):
        ledger.revoke_agent_key(world.officer, after=0, agent=public_hex(generate_key()))
    with pytest.raises(LedgerError, match="not written yet"):
        ledger.revoke_agent_key(world.officer, after=7)


def test_no_key_comes_back(world):
    """Otherwise an old decision could be replayed to bring a thief's key back."""
    ledger = world.create()
    old = world.agent
    ledger.rotate(generate_key())
    with pytest.raises(LedgerError, match="used before"):
        ledger.rotate(old)
    with pytest.raises(LedgerError, match="used before"):
        Ledger.open(world.path).rotate_agent_key(old, world.officer)
    refused(ledger, officer_key_rotation(ledger.standing.keys, old), world.officer, "used before")


def test_a_new_officer_is_named_by_the_old_one(world):
    ledger = world.create()
    old, new = world.officer, generate_key()
    change = officer_key_rotation(ledger.standing.keys, new)
    refused(ledger, change, None, "his signature is missing")
    refused(ledger, change, new, "is decided with key")
    refused(ledger, change.model_copy(update={"officer": public_hex(generate_key())}), old, "not proven")
    ledger.append(change, old)
    refused(ledger, StudyApproved(study_hash=PLAN), old, "is decided with key")
    ledger.append(StudyApproved(study_hash=PLAN), new)
    assert verify_ledger(world.path).is_valid


def test_a_new_ledger_continues_one_whose_officer_lost_his_key(world, tmp_path):
    old = world.create()
    world.train(old, 0, 1.0)
    world.train(old, 1, 1.4)
    there, carried = continuation_records(verify_ledger(world.path).entries, note="the officer's key is lost")
    assert (there.index, there.head) == (old.index, old.head)
    after = World(tmp_path / "after", coordinator=world.coordinator, clock=world.clock)
    ledger = after.create(continues=there)
    refused(ledger, charge(2, 1.7), match="before `carried` says what was spent")
    refused(ledger, carried, match="for the officer to decide")
    ledger.append(carried, after.officer)
    ledger.append(charge(2, 1.7))
    assert [c.total_epsilon for c in after.reopen().list_charges()] == [1.0, 1.4, 1.7]
    refused(ledger, carried, after.officer, "has them already")
    refused(old, CarriedCharges(charges=()), world.officer, "continues no other")


def test_opening_twice_is_refused(world):
    ledger = world.create()
    refused(ledger, world.opening(), world.officer, "opens the ledger a second time")


def test_others_may_not_write_the_file(world):
    world.create()
    assert not world.path.stat().st_mode & 0o027
