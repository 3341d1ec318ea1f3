"""Rotation and revocation of keys, a new officer, and a new ledger that continues an old one."""

import pytest

from pipeline.core.errors import LedgerError
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import CarriedCharges, StudyApproved
from privacy.ledger.signatures import lost_key_rotation, officer_key_rotation, routine_rotation
from privacy.ledger.summary import continuation_records
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import DATASET, STUDY_HASH, LedgerParties, assert_refused, make_charge


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


def test_routine_rotation(parties):
    ledger = parties.create_ledger()
    old, new = parties.agent, generate_key()
    ledger.rotate_agent_key(new)
    assert ledger.append(DATASET).key_fingerprint != ledger.entries()[0].key_fingerprint
    assert Ledger.open(parties.path, new).last_index == 2
    with pytest.raises(LedgerError, match="load the agent's key"):
        Ledger.open(parties.path, old)
    assert verify_ledger(parties.path).is_valid


def test_rotation_needs_a_possession_proof(parties):
    ledger = parties.create_ledger()
    rotation = routine_rotation(ledger.state.keys, parties.agent, generate_key())
    other_key = rotation.model_copy(update={"agent_key": public_hex(generate_key())})
    assert_refused(ledger, other_key, match="the agent has not proven possession of its new key")
    assert_refused(ledger, rotation.model_copy(update={"possession_proof": None}), match="not proven possession")


def test_lost_key_is_replaced_by_the_officer(parties):
    parties.create_ledger()
    new = generate_key()
    Ledger.open(parties.path).rotate_agent_key(new, parties.officer)
    assert Ledger.open(parties.path, new).append(DATASET).index == 2
    assert verify_ledger(parties.path).is_valid


def test_lost_key_is_replaced_by_the_officer_only(parties):
    ledger = parties.create_ledger()
    thief = generate_key()
    for officer in (thief, parties.agent, generate_key()):
        with pytest.raises(LedgerError, match="is decided with key"):
            Ledger.open(parties.path).rotate_agent_key(thief, officer)
    assert_refused(ledger, lost_key_rotation(thief), match="the officer's signature is missing")
    with pytest.raises(LedgerError, match="needs the old key"):
        Ledger.open(parties.path).rotate_agent_key(thief)
    assert ledger.last_index == 0


def test_after_a_revocation_only_the_officer_may_continue(parties):
    ledger = parties.create_ledger()
    ledger.append(DATASET)
    Ledger.open(parties.path).revoke_agent_key(parties.officer, last_trusted_index=1, reason="stolen")
    assert_refused(ledger, DATASET, match="the next entry must replace the agent's key")
    with pytest.raises(LedgerError, match="comes after a revocation"):
        ledger.rotate_agent_key(generate_key())  # the thief, by the stolen key
    new = generate_key()
    Ledger.open(parties.path).rotate_agent_key(new, parties.officer)
    assert Ledger.open(parties.path, new).append(DATASET).index == 4
    with pytest.raises(LedgerError, match="is signed by key"):
        ledger.append(DATASET)  # still the thief
    assert verify_ledger(parties.path).is_valid


def test_only_the_officer_revokes(parties):
    ledger = parties.create_ledger()
    for other in (parties.agent, generate_key()):
        with pytest.raises(LedgerError, match="and the officer's key is"):
            ledger.revoke_agent_key(other, last_trusted_index=0)
    with pytest.raises(LedgerError, match="never was the agent's key"):
        ledger.revoke_agent_key(parties.officer, last_trusted_index=0, agent_key=public_hex(generate_key()))
    with pytest.raises(LedgerError, match="not written yet"):
        ledger.revoke_agent_key(parties.officer, last_trusted_index=7)


def test_used_key_is_never_accepted_again(parties):
    """Otherwise an old decision could be replayed to bring a thief's key back."""
    ledger = parties.create_ledger()
    old = parties.agent
    ledger.rotate_agent_key(generate_key())
    with pytest.raises(LedgerError, match="used before"):
        ledger.rotate_agent_key(old)
    with pytest.raises(LedgerError, match="used before"):
        Ledger.open(parties.path).rotate_agent_key(old, parties.officer)
    assert_refused(ledger, officer_key_rotation(ledger.state.keys, old), parties.officer, "used before")


def test_new_officer_is_named_by_the_old_one(parties):
    ledger = parties.create_ledger()
    old, new = parties.officer, generate_key()
    change = officer_key_rotation(ledger.state.keys, new)
    assert_refused(ledger, change, None, "the officer's signature is missing")
    assert_refused(ledger, change, new, "is decided with key")
    other_key = change.model_copy(update={"officer_key": public_hex(generate_key())})
    assert_refused(ledger, other_key, old, "the officer has not proven possession")
    ledger.append(change, old)
    assert_refused(ledger, StudyApproved(study_hash=STUDY_HASH), old, "is decided with key")
    ledger.append(StudyApproved(study_hash=STUDY_HASH), new)
    assert verify_ledger(parties.path).is_valid


def test_new_ledger_continues_one_whose_officer_key_is_lost(parties, tmp_path):
    old = parties.create_ledger()
    parties.charge_round(old, 0, 1.0)
    parties.charge_round(old, 1, 1.4)
    previous_ledger, carried = continuation_records(verify_ledger(parties.path).entries, note="officer's key lost")
    assert (previous_ledger.index, previous_ledger.head) == (old.last_index, old.head)
    successor = LedgerParties(tmp_path / "after", coordinator=parties.coordinator, clock=parties.clock)
    ledger = successor.create_ledger(previous_ledger=previous_ledger)
    message = "comes before the `carried_charges` of the ledger that this one continues"
    assert_refused(ledger, make_charge(2, 1.7), match=message)
    assert_refused(ledger, carried, match="for the officer to decide")
    ledger.append(carried, successor.officer)
    ledger.append(make_charge(2, 1.7))
    assert [c.total_epsilon for c in successor.open_ledger().list_charges()] == [1.0, 1.4, 1.7]
    assert_refused(ledger, carried, successor.officer, "has them already")
    assert_refused(old, CarriedCharges(charges=()), parties.officer, "continues no other")
