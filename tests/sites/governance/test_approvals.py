"""Approvals: bound to their terms; ended by expiry, revocation and changes, and never revived."""

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import HemofedError, IncompatibleStudyError, LedgerError, RunFolderError
from privacy.ledger.entry import sign_decision
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import ApprovalRevoked, CosignerPolicy, DatasetSnapshot, LedgerBudget, StudyApproved
from privacy.ledger.signatures import fingerprint_of, officer_key_rotation, sign_consent
from privacy.ledger.verify import verify_ledger
from sites.governance.approvals import (
    approve_offer,
    check_approval,
    collect_approval_notices,
    recorded_approvals,
    revoke_approval,
)
from sites.governance.home import SiteHome
from tests.support.hospital import SITE, VALIDITY, Hospital, utc_now
from tests.support.ledger_factory import make_commitment


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def approval_state(hospital, offer, now=None):
    return check_approval(hospital.home, offer, now).state


def test_an_offer_is_pending_without_approval(hospital):
    status = check_approval(hospital.home, hospital.make_offer())
    assert (status.is_approved, status.state) == (False, "pending")
    assert "run-1 is not approved; ask the officer to approve it: `hemofed site approve`" in status.reason


def test_approval_terms(hospital):
    offer = hospital.make_offer("smear-private")
    hospital.approve(offer)
    (approval,) = recorded_approvals(hospital.home.ledger)
    assert approval.record.study_hash == offer.study_hash
    terms = approval.terms
    assert (terms.offer, terms.run, terms.dataset_id, terms.requested_epsilon) == (
        offer.digest,
        "run-1",
        "smears-2024",
        8.0,
    )
    assert terms.sites == {name: fingerprint_of(key) for name, key in offer.site_keys.items()}
    assert terms.coordinator == fingerprint_of(offer.coordinator_key)
    assert abs(terms.expires - (utc_now() + VALIDITY)) < timedelta(minutes=1)
    assert approval.entry.officer_decision.key_fingerprint == fingerprint_of(public_hex(hospital.officer))
    assert check_approval(hospital.home, offer).is_approved
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid


@pytest.mark.parametrize("signer", [generate_key(), "agent"])
def test_only_the_officer_approves(hospital, signer):
    home, offer = hospital.home, hospital.make_offer()
    with pytest.raises(LedgerError, match="is decided with key"):
        approve_offer(home, offer, home.agent_key if signer == "agent" else signer, utc_now() + VALIDITY)
    assert approval_state(hospital, offer) == "pending"


def test_a_changed_study_needs_a_new_approval(hospital):
    hospital.approve(hospital.make_offer())
    for changed_offer in (hospital.make_offer(rounds=99), hospital.make_offer(name="moons-other")):
        status = check_approval(hospital.home, changed_offer)
        assert status.state == "pending"
        assert "has changed since it was approved" in status.reason
    assert approval_state(hospital, hospital.make_offer(run="run-2")) == "pending"


def test_approval_expiry_and_a_clock_set_back_does_not_revive_it(hospital):
    offer = hospital.make_offer()
    hospital.approve(offer)
    assert approval_state(hospital, offer, utc_now() + VALIDITY - timedelta(minutes=1)) == "approved"
    assert approval_state(hospital, offer, utc_now() + VALIDITY) == "expired"
    later_ledger = Ledger.open(hospital.path / "ledger.jsonl", hospital.home.agent_key, lambda: utc_now() + VALIDITY)
    later_ledger.append(DatasetSnapshot(fingerprint="sha256:1", num_units=1, num_examples=1))
    assert approval_state(hospital, offer, utc_now()) == "expired"
    assert approval_state(hospital, offer, utc_now() - timedelta(days=365)) == "expired"


def test_an_approval_that_has_expired_already_is_refused(hospital):
    with pytest.raises(IncompatibleStudyError, match="would never be valid"):
        hospital.approve(hospital.make_offer(), timedelta(seconds=-1))


def test_revoke_approval(hospital):
    offer = hospital.make_offer()
    with pytest.raises(RunFolderError, match="'run-1' has no valid approval; approved runs: none"):
        revoke_approval(hospital.home, "run-1")
    hospital.approve(offer)
    other_handle = hospital.home
    assert check_approval(other_handle, offer).is_approved
    revoke_approval(hospital.home, "run-1", hospital.officer, "the ethics board")
    assert check_approval(other_handle, offer).state == "revoked"
    hospital.approve(offer)
    assert check_approval(other_handle, offer).is_approved
    revoke_approval(hospital.home, offer.digest)  # without the officer's key
    assert check_approval(other_handle, offer).state == "revoked"
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid
    hospital.approve(offer)
    with pytest.raises(LedgerError, match="is decided with key"):
        revoke_approval(hospital.home, "run-1", generate_key())


def test_revoking_a_study_hash_ends_the_approvals_of_all_its_offers(hospital):
    offers = hospital.make_offer(), hospital.make_offer(run="run-2")
    for offer in offers:
        hospital.approve(offer)
    revoke_approval(hospital.home, "run-2")
    assert [approval_state(hospital, offer) for offer in offers] == ["approved", "revoked"]
    hospital.home.ledger.append(ApprovalRevoked(study_hash=offers[0].study_hash), hospital.officer)
    assert approval_state(hospital, offers[0]) == "revoked"


def test_an_approval_signed_before_a_revocation_does_not_undo_it(hospital):
    """The signature is valid and not used before, but older than the revocation."""
    offer, home = hospital.make_offer(), hospital.home
    hospital.approve(offer)
    (approval,) = recorded_approvals(hospital.home.ledger)
    home.ledger.refresh()
    record = StudyApproved(study_hash=offer.study_hash, terms=approval.terms.model_dump(mode="json"))
    early_decision = sign_decision(hospital.officer, record, home.ledger.id, home.ledger.head)
    revoke_approval(home, "run-1")
    home.ledger.append(record, early_decision)
    assert approval_state(hospital, offer) == "revoked"


def test_cosigner_policy_requires_two_signatures(hospital):
    cosigner, offer, home = generate_key(), hospital.make_offer(), hospital.home
    hospital.approve(offer)
    home.ledger.append(CosignerPolicy(cosigner_key=public_hex(cosigner)), hospital.officer)
    status = check_approval(hospital.home, offer)
    assert "approved by one person, and the site's policy now requires two" in status.reason
    with pytest.raises(LedgerError, match="needs two signatures: the one by the cosigner's key"):
        hospital.approve(offer)
    for wrong_key in (generate_key(), hospital.officer, home.agent_key):
        with pytest.raises(LedgerError, match="the cosigner's signature is not valid"):
            hospital.approve(offer, cosigner=wrong_key)
    hospital.approve(offer, cosigner=cosigner)
    assert approval_state(hospital, offer) == "approved"
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid


def test_cosigner_policy_cannot_be_changed_by_one_person(hospital):
    cosigner, new_cosigner = generate_key(), generate_key()
    ledger = hospital.home.ledger
    for key in (public_hex(hospital.officer), public_hex(hospital.home.agent_key)):
        with pytest.raises(LedgerError, match="two persons need two keys"):
            ledger.append(CosignerPolicy(cosigner_key=key), hospital.officer)
    with pytest.raises(LedgerError, match="for the officer to decide"):
        ledger.append(CosignerPolicy(cosigner_key=public_hex(cosigner)))
    ledger.append(CosignerPolicy(cosigner_key=public_hex(cosigner)), hospital.officer)
    with pytest.raises(LedgerError, match="needs two signatures"):
        ledger.append(CosignerPolicy(cosigner_key=None), hospital.officer)
    with pytest.raises(LedgerError, match="two persons need two keys"):
        ledger.append(officer_key_rotation(ledger.state.keys, cosigner), hospital.officer)
    new_policy = CosignerPolicy(cosigner_key=public_hex(new_cosigner))
    consent = sign_consent(cosigner, new_policy, ledger.id, ledger.head)
    with pytest.raises(LedgerError, match="is not valid"):  # the consent is for another record
        ledger.append(CosignerPolicy(cosigner_key=None, consent=consent), hospital.officer)
    ledger.append(new_policy.model_copy(update={"consent": consent}), hospital.officer)
    assert ledger.state.cosigner_key == public_hex(new_cosigner)
    with pytest.raises(LedgerError, match="the cosigner signed it before the officer's last decision"):
        ledger.append(new_policy.model_copy(update={"consent": consent}), hospital.officer)


def test_approval_depends_on_budget_and_committed_epsilon(hospital):
    offer, home = hospital.make_offer("smear-private"), hospital.home
    hospital.approve(offer)
    home.ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), hospital.officer)
    assert approval_state(hospital, offer) == "approved"
    home.ledger.append(LedgerBudget(epsilon=7.0, delta=1e-5), hospital.officer)
    assert "the budget is lower than when run-1 was approved: epsilon 7, was 8" in check_approval(home, offer).reason
    hospital.approve(offer)
    assert approval_state(hospital, offer) == "approved"
    home.ledger.append(make_commitment(study_hash=offer.digest, epsilon=8.5))
    assert "has committed to epsilon 8.5, and 8 was approved" in check_approval(home, offer).reason


def test_incompatible_offers_are_refused(hospital):
    offer = hospital.make_offer()
    changes = {
        "is not for st-anne": {"site_keys": {"charite": offer.site_keys["charite"]}},
        "has another key of st-anne": {"site_keys": offer.site_keys | {SITE: public_hex(generate_key())}},
        "is offered by": {"coordinator_key": public_hex(generate_key())},
        "needs hemofed 99.0": {"version": "99.0"},
        "the hash of the study differs": {"study_hash": "ab" * 32},
        "not valid TOML": {"study_toml": "= no study"},
    }
    for reason, change in changes.items():
        changed_offer = offer.model_copy(update=change)
        status = check_approval(hospital.home, changed_offer)
        assert status.state == "refused"
        assert reason in status.reason
        with pytest.raises(HemofedError, match=reason):
            hospital.approve(changed_offer)
    hospital.approve(offer)
    hospital.set_coordinator(generate_key())
    assert "is offered by" in check_approval(hospital.home, offer).reason
    (hospital.path / "membership.json").unlink()
    assert "belongs to no coordinator" in check_approval(hospital.home, offer).reason
    hospital.set_coordinator(hospital.coordinator)
    home = hospital.home
    home.ledger.rotate_agent_key(generate_key())
    assert "has another key of st-anne" in check_approval(home, offer).reason


def test_approval_notices_to_the_coordinator(hospital):
    first, second = hospital.make_offer(), hospital.make_offer(run="run-2")
    hospital.approve(first)
    hospital.approve(second)
    revoke_approval(hospital.home, "run-2")
    notices = collect_approval_notices(hospital.home.ledger)
    assert [(a["run"], a["offer"], a["officer"]) for a in notices["approvals"]] == [
        ("run-1", first.digest, fingerprint_of(public_hex(hospital.officer)))
    ]
    assert [(w["run"], w["offer"]) for w in notices["revoked"]] == [("run-2", second.digest)]


@pytest.fixture(scope="module")
def approved(tmp_path_factory):
    hospital = Hospital(tmp_path_factory.mktemp("approved"))
    offer = hospital.make_offer()
    hospital.approve(offer)
    return hospital, offer, (hospital.path / "ledger.jsonl").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changing_any_byte_of_an_approval_invalidates_it(approved, data):
    hospital, offer, content = approved
    start = content.index(b"\n") + 1  # of the second line, the approval
    position = data.draw(st.integers(start, len(content) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != content[position]))
    file = hospital.path / "ledger.jsonl"
    file.write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
    try:
        with pytest.raises(LedgerError):
            check_approval(SiteHome.open(hospital.path), offer)
    finally:
        file.write_bytes(content)
    assert check_approval(SiteHome.open(hospital.path), offer).is_approved


def test_an_approval_with_other_terms_is_ignored(hospital):
    offer = hospital.make_offer()
    hospital.home.ledger.append(
        StudyApproved(study_hash=offer.study_hash, terms={"offer": offer.digest}), hospital.officer
    )
    assert approval_state(hospital, offer) == "pending"
