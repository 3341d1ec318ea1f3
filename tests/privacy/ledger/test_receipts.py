"""Receipts: backups do not refund, chains must extend, keys change with proof, and answers may be lost on their way."""

import shutil
from dataclasses import replace

import pytest

from pipeline.core.errors import LedgerError, NoSpaceError
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.entry import LedgerPosition, chain_hash, sign_decision, sign_entry
from privacy.ledger.keys import generate_key, is_valid_signature, public_hex, sign
from privacy.ledger.ledger import Ledger
from privacy.ledger.receipts import ReceiptRequest, check_receipt, create_receipt_request
from privacy.ledger.records import DatasetSnapshot, LedgerReceipt
from privacy.ledger.signatures import fingerprint_of
from privacy.ledger.summary import continuation_records
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import World, a_year, charge, fill, small_disk

DATA = DatasetSnapshot(fingerprint="sha256:9c0d", num_units=812, num_examples=20140)
WHO = ("st-anne", "smears-2019-2024")


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def ask(world, ledger, key=None, since=None):
    return create_receipt_request(ledger, key or world.agent, public_hex(world.coordinator), since)


def resigned(asked, key, **change):
    changed = asked.model_copy(update=change)
    return changed.model_copy(update={"signature": sign(key, "request", changed.statement())})


def text(entry):
    return entry.line().decode().strip()


def test_a_receipt_is_for_the_head(world):
    ledger = world.create()
    ledger.append(charge(0, 0.5))
    receipt = world.desk.countersign(ask(world, ledger))
    assert (receipt.site, receipt.dataset_id, receipt.index, receipt.head) == (*WHO, 1, ledger.head)
    assert is_valid_signature(public_hex(world.coordinator), "receipt", receipt.statement(), receipt.signature)
    check_receipt(receipt, ledger, public_hex(world.coordinator))
    ledger.append(receipt)
    assert verify_ledger(world.path, receipt, {public_hex(world.coordinator)}).is_valid


def test_the_coordinator_sees_digests_and_keys_only(world):
    ledger = world.create()
    ledger.append(DATA)
    ledger.append(charge(0, 0.5))
    sent = ask(world, ledger).model_dump_json()
    assert "sha256:9c0d" not in sent
    assert "anaemia" not in sent
    assert ReceiptRequest.model_validate_json(sent) == ask(world, ledger)


def test_a_request_goes_on_from_the_last_receipt(world):
    ledger = world.create()
    world.train(ledger, 0, 0.5)
    ledger.append(charge(1, 0.9))
    asked = ask(world, ledger)
    assert (asked.since_index, asked.index, len(asked.digests), asked.key_change_lines) == (2, 3, 2, ())
    world.receipt(ledger)
    assert verify_ledger(world.path).unreceipted_indices == ()


def test_a_year_of_receipts(world):
    """With two rotations, a revocation and a new officer on the way."""
    last = a_year(world)
    assert world.desk.last(*WHO) == last
    assert world.desk.last("elsewhere", WHO[1]) is None


# What a site may not do


def test_a_restored_backup_is_refused(world):
    ledger = world.create()
    world.train(ledger, 0, 0.5)
    backup = world.path.read_bytes()
    world.train(ledger, 1, 0.9)
    world.path.write_bytes(backup)
    ledger = world.reopen()
    with pytest.raises(
        LedgerError, match=r"older than, or another than, the one receipted at entry 3. A restored backup does"
    ):
        world.desk.countersign(ask(world, ledger))
    for turn in range(3):  # nor when it has grown longer than the lost one
        ledger.append(DATA.model_copy(update={"units": turn}))
    ledger.append(charge(1, 0.9))
    with pytest.raises(LedgerError, match="restore the newest copy"):
        world.desk.countersign(ask(world, ledger))
    assert world.desk.last(*WHO).index == 3


def test_a_ledger_made_anew_is_refused(world, tmp_path):
    """The same keys, the same data set, nothing spent."""
    world.train(world.create(), 0, 0.5)
    fresh = World(tmp_path / "fresh", world.agent, world.officer, world.coordinator).create()
    with pytest.raises(LedgerError, match="another than, the one receipted"):
        world.desk.countersign(ask(world, fresh))


def test_two_ends_of_one_ledger_get_one_receipt(world):
    ledger = world.create()
    world.receipt(ledger)
    whole = world.path.read_bytes()
    ledger.append(charge(0, 0.5))
    world.desk.countersign(ask(world, ledger))
    world.path.write_bytes(whole)
    other = world.reopen()
    other.append(charge(0, 0.1))
    with pytest.raises(LedgerError, match="another than"):
        world.desk.countersign(ask(world, other))


def test_digests_must_lead_to_the_head(world):
    ledger = world.create()
    ledger.append(DATA)
    good = ask(world, ledger)
    wrong = [
        {"head": "ab" * 32},
        {"digests": good.digests[:1]},
        {"digests": (*good.digests, "00" * 32)},
        {"digests": ()},
        {"digests": good.digests[::-1]},
        {"index": 2},
        {"shown": ()},
        {"ledger": "00" * 32},
        {"site": "elsewhere"},
        {"since": 1, "digests": good.digests[1:]},
    ]
    for change in wrong:
        with pytest.raises(LedgerError):
            world.desk.countersign(resigned(good, world.agent, **change))
    assert world.desk.last(*WHO) is None
    assert world.desk.last("elsewhere", WHO[1]) is None
    world.desk.countersign(good)


def test_a_ledger_that_opens_late_is_refused(world):
    data = sign_entry(DATA, [], world.agent, None, world.clock())
    late = sign_entry(
        world.opening(), [data], world.agent, sign_decision(world.officer, world.opening()), world.clock()
    )
    sent = {"since": 0, "index": 1, "head": late.hash, "digests": (data.digest, late.digest), "shown": (text(late),)}
    asked = resigned(ask(world, world.create()), world.agent, ledger=late.hash, **sent)
    with pytest.raises(LedgerError, match="entry 1 opens a ledger"):
        world.desk.countersign(asked)


def test_only_the_agent_asks(world):
    ledger = world.create()
    good = ask(world, ledger)
    for key in (generate_key(), world.officer, world.coordinator):
        with pytest.raises(LedgerError, match="not signed by the agent's key"):
            world.desk.countersign(ask(world, ledger, key))
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        world.desk.countersign(good.model_copy(update={"key": "someone"}))
    receipt = world.desk.countersign(good)
    with pytest.raises(LedgerError, match="not signed"):  # nor for the same head again
        world.desk.countersign(ask(world, ledger, generate_key()))
    assert world.desk.countersign(good) == receipt


# What may go wrong on the way


def test_a_lost_answer_is_given_again(world):
    ledger = world.create()
    ledger.append(charge(0, 0.5))
    first = world.desk.countersign(ask(world, ledger))
    assert world.desk.countersign(ask(world, world.reopen())) == first


def test_after_a_lost_answer_the_ledger_may_have_grown(world):
    ledger = world.create()
    world.receipt(ledger)
    ledger.append(charge(0, 0.5))
    world.desk.countersign(ask(world, ledger))  # never arrives
    ledger.append(DATA)
    asked = ask(world, ledger)
    assert asked.since_index == 1
    assert world.desk.countersign(asked).index == 3


def test_a_coordinator_that_lost_its_record_is_told_all(world):
    ledger = world.create()
    world.train(ledger, 0, 0.5)
    shutil.rmtree(world.folder / "coordinator")
    with pytest.raises(LedgerError, match="needs the digests since entry 0, not 2"):
        world.desk.countersign(ask(world, ledger))
    assert world.desk.countersign(ask(world, ledger, since=0)).index == 2


def test_a_damaged_record_is_not_a_first_contact(world):
    ledger = world.create()
    world.receipt(ledger)
    (file,) = (world.folder / "coordinator").glob("*.json")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(LedgerError, match="is damaged; restore its newest copy"):
        world.desk.countersign(ask(world, ledger))


def test_what_cannot_be_remembered_is_not_signed(tmp_path):
    with small_disk(tmp_path) as disk:
        world = World(tmp_path / "site")
        ledger = world.create()
        desk = LedgerCountersigner(disk / "coordinator", world.coordinator)
        first = desk.countersign(ask(world, ledger))
        ledger.append(DATA)
        fill(disk)
        with pytest.raises(NoSpaceError):
            desk.countersign(ask(world, ledger))
        assert desk.last_receipt(*WHO) == first


def test_two_coordinators_each_remember_their_own(world):
    ledger = world.create()
    world.train(ledger, 0, 0.5)
    other = generate_key()
    desk = LedgerCountersigner(world.folder / "other", other)
    receipt = desk.countersign(create_receipt_request(ledger, world.agent, public_hex(other)))
    ledger.append(receipt)
    assert ask(world, ledger).since_index == 2
    assert create_receipt_request(ledger, world.agent, public_hex(other)).since_index == 3
    assert verify_ledger(world.path, receipt).is_valid
    assert verify_ledger(world.path, world.desk.last(*WHO)).is_valid
    unrecorded = world.desk.countersign(ask(world, ledger))
    ledger.append(DATA)
    ledger.append(desk.countersign(create_receipt_request(ledger, world.agent, public_hex(other))))
    assert "does not hold that receipt" in verify_ledger(world.path, unrecorded).problems[0]


# The site's side


@pytest.mark.parametrize(
    "change", [{"index": 0}, {"head": "00" * 32}, {"site": "elsewhere"}, {"time": "2031"}, {"signature": "00" * 64}]
)
def test_a_receipt_is_checked_before_it_is_believed(world, change):
    ledger = world.create()
    ledger.append(DATA)
    receipt = world.desk.countersign(ask(world, ledger))
    with pytest.raises(LedgerError, match="is not for"):
        check_receipt(LedgerReceipt(**(receipt.model_dump() | change)), ledger, public_hex(world.coordinator))
    with pytest.raises(LedgerError, match="the coordinator's key is"):
        check_receipt(receipt, ledger, public_hex(generate_key()))


# Keys


def test_officers_may_be_expected(world):
    ledger = world.create()
    asked = ask(world, ledger)
    officer = fingerprint_of(public_hex(world.officer))
    for expected in ({}, {"elsewhere": officer}, {"st-anne": fingerprint_of(public_hex(generate_key()))}):
        with pytest.raises(LedgerError, match="not the one expected; hear the fingerprint from the officer"):
            LedgerCountersigner(world.folder / "strict", world.coordinator, expected).countersign(asked)
    LedgerCountersigner(world.folder / "strict", world.coordinator, {"st-anne": officer}).countersign(asked)


def test_a_rotation_is_proven(world):
    ledger = world.create()
    world.receipt(ledger)
    old, new = world.agent, generate_key()
    ledger.rotate(new)
    asked = ask(world, ledger, new)
    assert len(asked.key_change_lines) == 1
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        world.desk.countersign(resigned(asked, new, shown=()))
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        world.desk.countersign(ask(world, ledger, old))
    assert world.desk.countersign(asked).index == 2


def test_a_shown_entry_must_be_the_one_in_the_ledger(world):
    ledger = world.create()
    world.receipt(ledger)
    thief, new = generate_key(), generate_key()
    other = World(world.folder / "other", world.agent, world.officer)
    foreign = other.create()
    foreign.append(DATA)
    foreign.rotate_agent_key(thief)
    ledger.rotate(new)
    with pytest.raises(LedgerError, match="entry 2 as shown is not the one in the ledger"):
        world.desk.countersign(
            resigned(ask(world, ledger, new), thief, shown=ask(other, foreign, thief).key_change_lines[1:])
        )


def test_a_thief_without_the_officer_cannot_bring_in_a_key(world):
    """He writes a good chain by hand, with a `lost` rotation that the officer never signed."""
    ledger = world.create()
    world.receipt(ledger)
    thief, real = generate_key(), World(world.folder / "copy", world.agent, world.officer)
    real.path.parent.mkdir()
    real.path.write_bytes(world.path.read_bytes())
    entry = Ledger.open(real.path).rotate_agent_key(thief, world.officer)
    for officer in (None, replace(entry.officer_decision, signature="00" * 64)):
        forged = replace(entry, officer=officer, hash="")
        forged = replace(forged, hash=chain_hash(forged.previous_hash, forged.digest))
        forged = replace(forged, signature=sign(thief, "entry", forged.hash))
        asked = ask(world, ledger, thief)
        asked = resigned(
            asked,
            thief,
            index=2,
            head=forged.hash,
            digests=(asked.digests[0], forged.digest),
            shown=(text(forged),),
        )
        with pytest.raises(LedgerError, match=r"entry 2 .*(his signature is missing|signature does not fit)"):
            world.desk.countersign(asked)


def test_a_revoked_key_gets_no_receipt(world):
    ledger = world.create()
    world.receipt(ledger)
    thief = world.agent
    ledger.revoke_agent_key(world.officer, after=1)
    with pytest.raises(LedgerError, match="is revoked"):
        world.desk.countersign(ask(world, ledger, thief))
    world.agent = generate_key()
    ledger.rotate(world.agent, world.officer)
    world.receipt(ledger)
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        world.desk.countersign(ask(world, ledger, thief))


def test_the_officer_takes_a_ledger_back_from_a_thief(world, tmp_path):
    """The thief had a copy and the key, and got receipts for it. The site's own ledger is refused from then on."""
    ledger = world.create()
    world.train(ledger, 0, 0.5)
    copy = World(tmp_path / "thief", world.agent, coordinator=world.coordinator)
    copy.folder.mkdir()
    copy.path.write_bytes(world.path.read_bytes())
    taken = Ledger.open(copy.path, world.agent, world.clock)
    thief = generate_key()
    taken.rotate_agent_key(thief)
    world.desk.countersign(ask(world, taken, thief))
    ledger.append(charge(1, 0.9))
    with pytest.raises(LedgerError, match="the officer opens a new ledger that continues") as told:
        world.desk.countersign(ask(world, ledger))
    end = world.desk.last(*WHO)
    assert f"continues ledger {ledger.id} from entry {end.index}, head {end.head}" in str(told.value)

    there, carried = continuation_records(ledger.entries(), LedgerPosition(end.index, end.head), note="key stolen")
    after = World(tmp_path / "after", officer=world.officer, coordinator=world.coordinator)
    fresh = after.create(continues=there)
    fresh.append(carried, world.officer)
    assert world.desk.countersign(ask(after, fresh)).index == 1
    assert [c.total_epsilon for c in fresh.list_charges()] == [0.5, 0.9]
    with pytest.raises(LedgerError, match="another than"):
        world.desk.countersign(ask(world, taken, thief))


def test_a_continuation_is_the_officers(world, tmp_path):
    """By another officer only if his fingerprint is expected; and only from the last receipt."""
    ledger = world.create()
    world.train(ledger, 0, 0.5)
    end = world.desk.last(*WHO)
    there, _ = continuation_records(ledger.entries(), end)
    early, _ = continuation_records(ledger.entries(), LedgerPosition(0, ledger.id))
    stale = World(tmp_path / "stale", officer=world.officer)
    with pytest.raises(LedgerError, match="another than"):
        world.desk.countersign(ask(world, stale.create(continues=early), stale.agent))
    other = World(tmp_path / "other")
    fresh = other.create(continues=there)
    with pytest.raises(LedgerError, match="if that is lost, hear the new fingerprint from him and expect it"):
        world.desk.countersign(ask(world, fresh, other.agent))
    told = LedgerCountersigner(
        world.folder / "coordinator", world.coordinator, {"st-anne": fingerprint_of(public_hex(other.officer))}
    )
    assert told.countersign(ask(world, fresh, other.agent)).index == 0
