"""Receipts: no refund by a restored backup, digest chains, key changes with proof, and lost replies."""

import shutil
from dataclasses import replace

import pytest

from pipeline.core.errors import LedgerError, NoSpaceError
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.entry import LedgerPosition, chain_hash, sign_decision, sign_entry
from privacy.ledger.keys import generate_key, is_valid_signature, public_hex, sign
from privacy.ledger.ledger import Ledger
from privacy.ledger.receipts import ReceiptRequest, check_receipt, create_receipt_request
from privacy.ledger.records import LedgerReceipt
from privacy.ledger.signatures import fingerprint_of
from privacy.ledger.summary import continuation_records
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import (
    DATASET,
    DATASET_ID,
    SITE,
    LedgerParties,
    create_long_ledger,
    make_charge,
)
from tests.support.machine import fill_disk, mount_small_disk


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


def change_and_sign(request, key, **change):
    assert set(change) <= set(ReceiptRequest.model_fields)
    changed = request.model_copy(update=change)
    return changed.model_copy(update={"signature": sign(key, "request", changed.signed_content())})


def line_of(entry):
    return entry.to_line().decode().strip()


def test_receipt_is_for_the_head(parties):
    ledger = parties.create_ledger()
    ledger.append(make_charge(0, 0.5))
    receipt = parties.countersigner.countersign(parties.make_request(ledger))
    assert (receipt.site, receipt.dataset_id, receipt.index, receipt.head) == (SITE, DATASET_ID, 1, ledger.head)
    assert is_valid_signature(public_hex(parties.coordinator), "receipt", receipt.signed_content(), receipt.signature)
    check_receipt(receipt, ledger, public_hex(parties.coordinator))
    ledger.append(receipt)
    assert verify_ledger(parties.path, receipt, {public_hex(parties.coordinator)}).is_valid


def test_receipt_request_holds_digests_and_key_changes_only(parties):
    ledger = parties.create_ledger()
    ledger.append(DATASET)
    ledger.append(make_charge(0, 0.5))
    sent = parties.make_request(ledger).model_dump_json()
    assert "sha256:9c0d" not in sent
    assert "anaemia" not in sent
    assert ReceiptRequest.model_validate_json(sent) == parties.make_request(ledger)


def test_receipt_request_starts_after_the_last_receipt(parties):
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 0.5)
    ledger.append(make_charge(1, 0.9))
    request = parties.make_request(ledger)
    assert (request.since_index, request.index, len(request.digests), request.key_change_lines) == (2, 3, 2, ())
    parties.append_receipt(ledger)
    assert verify_ledger(parties.path).unreceipted_indices == ()


def test_receipts_of_a_long_ledger(parties):
    """With two rotations, a revocation and a new officer."""
    last = create_long_ledger(parties)
    assert parties.countersigner.last_receipt(SITE, DATASET_ID) == last
    assert parties.countersigner.last_receipt("elsewhere", DATASET_ID) is None


# Requests that are refused


def test_restored_backup_is_refused(parties):
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 0.5)
    backup = parties.path.read_bytes()
    parties.charge_round(ledger, 1, 0.9)
    parties.path.write_bytes(backup)
    ledger = parties.open_ledger()
    with pytest.raises(
        LedgerError, match=r"older than, or another than, the one receipted at entry 3. A restored backup does"
    ):
        parties.countersigner.countersign(parties.make_request(ledger))
    for n in range(3):  # also when it has grown longer than the lost one
        ledger.append(DATASET.model_copy(update={"num_units": n}))
    ledger.append(make_charge(1, 0.9))
    with pytest.raises(LedgerError, match="restore the newest copy"):
        parties.countersigner.countersign(parties.make_request(ledger))
    assert parties.countersigner.last_receipt(SITE, DATASET_ID).index == 3


def test_second_ledger_of_the_same_keys_is_refused(parties, tmp_path):
    """The same keys, the same data set, nothing spent."""
    parties.charge_round(parties.create_ledger(), 0, 0.5)
    second = LedgerParties(tmp_path / "second", parties.agent, parties.officer, parties.coordinator).create_ledger()
    with pytest.raises(LedgerError, match="another than, the one receipted"):
        parties.countersigner.countersign(parties.make_request(second))


def test_forked_ledger_gets_one_receipt(parties):
    ledger = parties.create_ledger()
    parties.append_receipt(ledger)
    original = parties.path.read_bytes()
    ledger.append(make_charge(0, 0.5))
    parties.countersigner.countersign(parties.make_request(ledger))
    parties.path.write_bytes(original)
    other = parties.open_ledger()
    other.append(make_charge(0, 0.1))
    with pytest.raises(LedgerError, match="another than"):
        parties.countersigner.countersign(parties.make_request(other))


def test_digests_must_lead_to_the_head(parties):
    ledger = parties.create_ledger()
    ledger.append(DATASET)
    good = parties.make_request(ledger)
    wrong = [
        {"head": "ab" * 32},
        {"digests": good.digests[:1]},
        {"digests": (*good.digests, "00" * 32)},
        {"digests": ()},
        {"digests": good.digests[::-1]},
        {"index": 2},
        {"key_change_lines": ()},
        {"ledger_id": "00" * 32},
        {"site": "elsewhere"},
        {"since_index": 1, "digests": good.digests[1:]},
    ]
    for change in wrong:
        with pytest.raises(LedgerError):
            parties.countersigner.countersign(change_and_sign(good, parties.agent, **change))
    assert parties.countersigner.last_receipt(SITE, DATASET_ID) is None
    assert parties.countersigner.last_receipt("elsewhere", DATASET_ID) is None
    parties.countersigner.countersign(good)


def test_ledger_whose_opened_record_is_not_first_is_refused(parties):
    data = sign_entry(DATASET, [], parties.agent, None, parties.clock())
    late = sign_entry(
        parties.make_opening(),
        [data],
        parties.agent,
        sign_decision(parties.officer, parties.make_opening()),
        parties.clock(),
    )
    sent = {
        "since_index": 0,
        "index": 1,
        "head": late.hash,
        "digests": (data.digest, late.digest),
        "key_change_lines": (line_of(late),),
    }
    request = change_and_sign(parties.make_request(parties.create_ledger()), parties.agent, ledger_id=late.hash, **sent)
    with pytest.raises(LedgerError, match="entry 1 opens a ledger"):
        parties.countersigner.countersign(request)


def test_receipt_request_needs_the_agents_signature(parties):
    ledger = parties.create_ledger()
    good = parties.make_request(ledger)
    for key in (generate_key(), parties.officer, parties.coordinator):
        with pytest.raises(LedgerError, match="not signed by the agent's key"):
            parties.countersigner.countersign(parties.make_request(ledger, key))
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        parties.countersigner.countersign(good.model_copy(update={"agent_fingerprint": "someone"}))
    receipt = parties.countersigner.countersign(good)
    with pytest.raises(LedgerError, match="not signed"):  # also for the same head again
        parties.countersigner.countersign(parties.make_request(ledger, generate_key()))
    assert parties.countersigner.countersign(good) == receipt


# Lost replies and damaged records


def test_lost_receipt_is_sent_again(parties):
    ledger = parties.create_ledger()
    ledger.append(make_charge(0, 0.5))
    first = parties.countersigner.countersign(parties.make_request(ledger))
    assert parties.countersigner.countersign(parties.make_request(parties.open_ledger())) == first


def test_ledger_may_grow_after_a_lost_receipt(parties):
    ledger = parties.create_ledger()
    parties.append_receipt(ledger)
    ledger.append(make_charge(0, 0.5))
    parties.countersigner.countersign(parties.make_request(ledger))  # the reply is lost
    ledger.append(DATASET)
    request = parties.make_request(ledger)
    assert request.since_index == 1
    assert parties.countersigner.countersign(request).index == 3


def test_coordinator_without_record_needs_all_digests(parties):
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 0.5)
    shutil.rmtree(parties.folder / "coordinator")
    with pytest.raises(LedgerError, match="needs the digests since entry 0, not 2"):
        parties.countersigner.countersign(parties.make_request(ledger))
    assert parties.countersigner.countersign(parties.make_request(ledger, since_index=0)).index == 2


def test_damaged_coordinator_record_is_refused(parties):
    ledger = parties.create_ledger()
    parties.append_receipt(ledger)
    (file,) = (parties.folder / "coordinator").glob("*.json")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(LedgerError, match="is damaged; restore its newest copy"):
        parties.countersigner.countersign(parties.make_request(ledger))


def test_receipt_is_not_signed_on_a_full_disk(tmp_path):
    with mount_small_disk(tmp_path / "disk") as disk:
        parties = LedgerParties(tmp_path / "site")
        ledger = parties.create_ledger()
        countersigner = LedgerCountersigner(disk / "coordinator", parties.coordinator)
        first = countersigner.countersign(parties.make_request(ledger))
        ledger.append(DATASET)
        fill_disk(disk)
        with pytest.raises(NoSpaceError):
            countersigner.countersign(parties.make_request(ledger))
        assert countersigner.last_receipt(SITE, DATASET_ID) == first


def test_two_coordinators_keep_their_own_receipts(parties):
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 0.5)
    other = generate_key()
    countersigner = LedgerCountersigner(parties.folder / "other", other)
    receipt = countersigner.countersign(create_receipt_request(ledger, parties.agent, public_hex(other)))
    ledger.append(receipt)
    assert parties.make_request(ledger).since_index == 2
    assert create_receipt_request(ledger, parties.agent, public_hex(other)).since_index == 3
    assert verify_ledger(parties.path, receipt).is_valid
    assert verify_ledger(parties.path, parties.countersigner.last_receipt(SITE, DATASET_ID)).is_valid
    unrecorded = parties.countersigner.countersign(parties.make_request(ledger))
    ledger.append(DATASET)
    ledger.append(countersigner.countersign(create_receipt_request(ledger, parties.agent, public_hex(other))))
    assert "does not hold that receipt" in verify_ledger(parties.path, unrecorded).problems[0]


# The site's side


@pytest.mark.parametrize(
    "change", [{"index": 0}, {"head": "00" * 32}, {"site": "elsewhere"}, {"time": "2031"}, {"signature": "00" * 64}]
)
def test_changed_receipt_is_refused_at_the_site(parties, change):
    ledger = parties.create_ledger()
    ledger.append(DATASET)
    receipt = parties.countersigner.countersign(parties.make_request(ledger))
    with pytest.raises(LedgerError, match="is not for"):
        check_receipt(LedgerReceipt(**(receipt.model_dump() | change)), ledger, public_hex(parties.coordinator))
    with pytest.raises(LedgerError, match="the coordinator's key is"):
        check_receipt(receipt, ledger, public_hex(generate_key()))


# Key changes


def test_officer_fingerprints_may_be_expected(parties):
    ledger = parties.create_ledger()
    request = parties.make_request(ledger)
    officer = fingerprint_of(public_hex(parties.officer))
    for expected in ({}, {"elsewhere": officer}, {"st-anne": fingerprint_of(public_hex(generate_key()))}):
        with pytest.raises(
            LedgerError, match="not the expected one; compare the fingerprint with the officer by telephone"
        ):
            LedgerCountersigner(parties.folder / "strict", parties.coordinator, expected).countersign(request)
    LedgerCountersigner(parties.folder / "strict", parties.coordinator, {"st-anne": officer}).countersign(request)


def test_key_rotation_needs_its_entry(parties):
    ledger = parties.create_ledger()
    parties.append_receipt(ledger)
    old, new = parties.agent, generate_key()
    ledger.rotate_agent_key(new)
    request = parties.make_request(ledger, new)
    assert len(request.key_change_lines) == 1
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        parties.countersigner.countersign(change_and_sign(request, new, key_change_lines=()))
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        parties.countersigner.countersign(parties.make_request(ledger, old))
    assert parties.countersigner.countersign(request).index == 2


def test_shown_entry_must_be_the_one_in_the_ledger(parties):
    ledger = parties.create_ledger()
    parties.append_receipt(ledger)
    thief, new = generate_key(), generate_key()
    other = LedgerParties(parties.folder / "other", parties.agent, parties.officer)
    foreign = other.create_ledger()
    foreign.append(DATASET)
    foreign.rotate_agent_key(thief)
    ledger.rotate_agent_key(new)
    with pytest.raises(LedgerError, match="entry 2 as shown is not the one in the ledger"):
        parties.countersigner.countersign(
            change_and_sign(
                parties.make_request(ledger, new),
                thief,
                key_change_lines=other.make_request(foreign, thief).key_change_lines[1:],
            )
        )


def test_forged_lost_key_rotation_is_refused(parties):
    """The thief forges a valid chain with a rotation of reason "lost" that the officer never signed."""
    ledger = parties.create_ledger()
    parties.append_receipt(ledger)
    thief, real = generate_key(), LedgerParties(parties.folder / "copy", parties.agent, parties.officer)
    real.path.parent.mkdir()
    real.path.write_bytes(parties.path.read_bytes())
    entry = Ledger.open(real.path).rotate_agent_key(thief, parties.officer)
    for decision in (None, replace(entry.officer_decision, signature="00" * 64)):
        forged = replace(entry, officer_decision=decision, hash="")
        forged = replace(forged, hash=chain_hash(forged.previous_hash, forged.digest))
        forged = replace(forged, signature=sign(thief, "entry", forged.hash))
        request = parties.make_request(ledger, thief)
        request = change_and_sign(
            request,
            thief,
            index=2,
            head=forged.hash,
            digests=(request.digests[0], forged.digest),
            key_change_lines=(line_of(forged),),
        )
        with pytest.raises(LedgerError, match=r"entry 2 .*(signature is missing|signature is not valid)"):
            parties.countersigner.countersign(request)


def test_revoked_key_gets_no_receipt(parties):
    ledger = parties.create_ledger()
    parties.append_receipt(ledger)
    thief = parties.agent
    ledger.revoke_agent_key(parties.officer, last_trusted_index=1)
    with pytest.raises(LedgerError, match="is revoked"):
        parties.countersigner.countersign(parties.make_request(ledger, thief))
    parties.agent = generate_key()
    ledger.rotate_agent_key(parties.agent, parties.officer)
    parties.append_receipt(ledger)
    with pytest.raises(LedgerError, match="not signed by the agent's key"):
        parties.countersigner.countersign(parties.make_request(ledger, thief))


def test_officer_continues_a_ledger_after_a_key_theft(parties, tmp_path):
    """A thief with a copy and the key got receipts for it, so the site's own ledger is refused."""
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 0.5)
    copy = LedgerParties(tmp_path / "thief", parties.agent, coordinator=parties.coordinator)
    copy.folder.mkdir()
    copy.path.write_bytes(parties.path.read_bytes())
    stolen = Ledger.open(copy.path, parties.agent, parties.clock)
    thief = generate_key()
    stolen.rotate_agent_key(thief)
    parties.countersigner.countersign(parties.make_request(stolen, thief))
    ledger.append(make_charge(1, 0.9))
    with pytest.raises(LedgerError, match="the officer opens a new ledger that continues") as raised:
        parties.countersigner.countersign(parties.make_request(ledger))
    end = parties.countersigner.last_receipt(SITE, DATASET_ID)
    assert f"continues ledger {ledger.id} from entry {end.index}, head {end.head}" in str(raised.value)

    previous, carried = continuation_records(ledger.entries(), LedgerPosition(end.index, end.head), note="key stolen")
    successor = LedgerParties(tmp_path / "after", officer=parties.officer, coordinator=parties.coordinator)
    new_ledger = successor.create_ledger(previous_ledger=previous)
    new_ledger.append(carried, parties.officer)
    assert parties.countersigner.countersign(successor.make_request(new_ledger)).index == 1
    assert [c.total_epsilon for c in new_ledger.list_charges()] == [0.5, 0.9]
    with pytest.raises(LedgerError, match="another than"):
        parties.countersigner.countersign(parties.make_request(stolen, thief))


def test_continuation_needs_the_expected_officer_and_the_last_receipt(parties, tmp_path):
    """Another officer's fingerprint must be expected, and the continuation must start at the last receipt."""
    ledger = parties.create_ledger()
    parties.charge_round(ledger, 0, 0.5)
    end = parties.countersigner.last_receipt(SITE, DATASET_ID)
    previous, _ = continuation_records(ledger.entries(), end)
    early, _ = continuation_records(ledger.entries(), LedgerPosition(0, ledger.id))
    stale = LedgerParties(tmp_path / "stale", officer=parties.officer)
    with pytest.raises(LedgerError, match="another than"):
        parties.countersigner.countersign(parties.make_request(stale.create_ledger(previous_ledger=early), stale.agent))
    other = LedgerParties(tmp_path / "other")
    new_ledger = other.create_ledger(previous_ledger=previous)
    with pytest.raises(LedgerError, match="if the old key is lost, compare the new fingerprint with the"):
        parties.countersigner.countersign(parties.make_request(new_ledger, other.agent))
    expecting = LedgerCountersigner(
        parties.folder / "coordinator", parties.coordinator, {"st-anne": fingerprint_of(public_hex(other.officer))}
    )
    assert expecting.countersign(parties.make_request(new_ledger, other.agent)).index == 0
