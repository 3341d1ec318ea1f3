"""Approvals: bound to all that they were given for, ended by time, by withdrawal and by change, and never revived."""

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
from tests.support.hospital import SITE, SOON, Hospital, now
from tests.support.ledger_factory import commit


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def state(hospital, offer, at=None):
    return check_approval(hospital.home, offer, at).state


def test_nothing_is_approved_by_itself(hospital):
    verdict = check_approval(hospital.home, hospital.offer())
    assert (verdict.is_approved, verdict.state) == (False, "pending")
    assert "run-1 is not approved; let the officer look at it: `hemofed site approve`" in verdict.reason


def test_an_approval_says_what_it_is_for(hospital):
    offer = hospital.offer("smear-private")
    hospital.approve(offer)
    (given,) = recorded_approvals(hospital.home.ledger)
    assert given.body.study_hash == offer.plan
    terms = given.terms
    assert (terms.offer, terms.run, terms.dataset_id, terms.requested_epsilon) == (
        offer.digest,
        "run-1",
        "smears-2024",
        8.0,
    )
    assert terms.sites == {name: fingerprint_of(key) for name, key in offer.sites.items()}
    assert terms.coordinator == fingerprint_of(offer.coordinator)
    assert abs(terms.expires - (now() + SOON)) < timedelta(minutes=1)
    assert given.entry.officer_decision.key_fingerprint == fingerprint_of(public_hex(hospital.officer))
    assert check_approval(hospital.home, offer).is_approved
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid


@pytest.mark.parametrize("signer", [generate_key(), "agent"])
def test_only_the_officer_approves(hospital, signer):
    home, offer = hospital.home, hospital.offer()
    with pytest.raises(LedgerError, match="is decided with key"):
        approve_offer(home, offer, home.key if signer == "agent" else signer, now() + SOON)
    assert state(hospital, offer) == "pending"


def test_a_changed_plan_needs_a_new_one(hospital):
    hospital.approve(hospital.offer())
    for changed in (hospital.offer(rounds=99), hospital.offer(name="moons-other")):
        verdict = check_approval(hospital.home, changed)
        assert verdict.state == "pending"
        assert "has changed since it was approved" in verdict.reason
    assert state(hospital, hospital.offer(run="run-2")) == "pending"


def test_it_ends_in_time_and_a_clock_set_back_does_not_revive_it(hospital):
    offer = hospital.offer()
    hospital.approve(offer)
    assert state(hospital, offer, now() + SOON - timedelta(minutes=1)) == "approved"
    assert state(hospital, offer, now() + SOON) == "expired"
    later = Ledger.open(hospital.path / "ledger.jsonl", hospital.home.key, lambda: now() + SOON)
    later.append(DatasetSnapshot(fingerprint="sha256:1", num_units=1, num_examples=1))
    assert state(hospital, offer, now()) == "expired"
    assert state(hospital, offer, now() - timedelta(days=365)) == "expired"


def test_an_approval_that_never_stood_is_not_given(hospital):
    with pytest.raises(IncompatibleStudyError, match="would never stand"):
        hospital.approve(hospital.offer(), timedelta(seconds=-1))


def test_withdrawing(hospital):
    offer = hospital.offer()
    with pytest.raises(RunFolderError, match="no approval of 'run-1' stands; approved runs: none"):
        revoke_approval(hospital.home, "run-1")
    hospital.approve(offer)
    watching = hospital.home
    assert check_approval(watching, offer).is_approved
    revoke_approval(hospital.home, "run-1", hospital.officer, "the ethics board")
    assert check_approval(watching, offer).state == "withdrawn"
    hospital.approve(offer)
    assert check_approval(watching, offer).is_approved
    revoke_approval(hospital.home, offer.digest)  # without the officer
    assert check_approval(watching, offer).state == "withdrawn"
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid
    hospital.approve(offer)
    with pytest.raises(LedgerError, match="is decided with key"):
        revoke_approval(hospital.home, "run-1", generate_key())


def test_a_withdrawal_of_the_plan_ends_all_its_offers(hospital):
    offers = hospital.offer(), hospital.offer(run="run-2")
    for offer in offers:
        hospital.approve(offer)
    revoke_approval(hospital.home, "run-2")
    assert [state(hospital, offer) for offer in offers] == ["approved", "withdrawn"]
    hospital.home.ledger.append(ApprovalRevoked(study_hash=offers[0].plan), hospital.officer)
    assert state(hospital, offers[0]) == "withdrawn"


def test_a_decision_held_back_does_not_undo_a_withdrawal(hospital):
    """The officer's signature from before the withdrawal is a good one, and used for the first time."""
    offer, home = hospital.offer(), hospital.home
    hospital.approve(offer)
    (given,) = recorded_approvals(hospital.home.ledger)
    home.ledger.refresh()
    body = StudyApproved(study_hash=offer.plan, terms=given.terms.model_dump(mode="json"))
    held_back = sign_decision(hospital.officer, body, home.ledger.id, home.ledger.head)
    revoke_approval(home, "run-1")
    home.ledger.append(body, held_back)
    assert state(hospital, offer) == "withdrawn"


def test_two_persons(hospital):
    second, offer, home = generate_key(), hospital.offer(), hospital.home
    hospital.approve(offer)
    home.ledger.append(CosignerPolicy(cosigner_key=public_hex(second)), hospital.officer)
    verdict = check_approval(hospital.home, offer)
    assert "approved by one person, and the site's policy has asked for two since" in verdict.reason
    with pytest.raises(LedgerError, match="takes two persons: the signature of the second one"):
        hospital.approve(offer)
    for wrong in (generate_key(), hospital.officer, home.key):
        with pytest.raises(LedgerError, match="the second person's signature does not fit it"):
            hospital.approve(offer, second=wrong)
    hospital.approve(offer, second=second)
    assert state(hospital, offer) == "approved"
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid


def test_one_cannot_undo_what_takes_two(hospital):
    second, third = generate_key(), generate_key()
    ledger = hospital.home.ledger
    for key in (public_hex(hospital.officer), public_hex(hospital.home.key)):
        with pytest.raises(LedgerError, match="two persons need two keys"):
            ledger.append(CosignerPolicy(cosigner_key=key), hospital.officer)
    with pytest.raises(LedgerError, match="for the officer to decide"):
        ledger.append(CosignerPolicy(cosigner_key=public_hex(second)))
    ledger.append(CosignerPolicy(cosigner_key=public_hex(second)), hospital.officer)
    with pytest.raises(LedgerError, match="takes two persons"):
        ledger.append(CosignerPolicy(cosigner_key=None), hospital.officer)
    with pytest.raises(LedgerError, match="two persons need two keys"):
        ledger.append(officer_key_rotation(ledger.standing.keys, second), hospital.officer)
    changed = CosignerPolicy(cosigner_key=public_hex(third))
    agreed = sign_consent(second, changed, ledger.id, ledger.head)
    with pytest.raises(LedgerError, match="does not fit"):  # what he agreed to was something else
        ledger.append(CosignerPolicy(cosigner_key=None, consent=agreed), hospital.officer)
    ledger.append(changed.model_copy(update={"consent": agreed}), hospital.officer)
    assert ledger.state.second == public_hex(third)
    with pytest.raises(LedgerError, match="signed it before the officer's last decision"):
        ledger.append(changed.model_copy(update={"consent": agreed}), hospital.officer)


def test_what_an_approval_stands_on(hospital):
    offer, home = hospital.offer("smear-private"), hospital.home
    hospital.approve(offer)
    home.ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), hospital.officer)
    assert state(hospital, offer) == "approved"
    home.ledger.append(LedgerBudget(epsilon=7.0, delta=1e-5), hospital.officer)
    assert "the budget is lower than when run-1 was approved: epsilon 7, was 8" in check_approval(home, offer).reason
    hospital.approve(offer)
    assert state(hospital, offer) == "approved"
    home.ledger.append(commit(plan=offer.digest, epsilon=8.5))
    assert "has committed to epsilon 8.5, and 8 was approved" in check_approval(home, offer).reason


def test_offers_that_no_approval_helps(hospital):
    offer = hospital.offer()
    wrong = {
        "is not for st-anne": {"sites": {"charite": offer.sites["charite"]}},
        "by another key": {"sites": offer.sites | {SITE: public_hex(generate_key())}},
        "is offered by": {"coordinator": public_hex(generate_key())},
        "needs hemofed 99.0": {"version": "99.0"},
        "the plan's hash is not that of the study": {"plan": "ab" * 32},
        "not valid TOML": {"study": "= no study"},
    }
    for reason, change in wrong.items():
        bad = offer.model_copy(update=change)
        verdict = check_approval(hospital.home, bad)
        assert verdict.state == "refused"
        assert reason in verdict.reason
        with pytest.raises(HemofedError, match=reason):
            hospital.approve(bad)
    hospital.approve(offer)
    hospital.join(generate_key())
    assert "is offered by" in check_approval(hospital.home, offer).reason
    (hospital.path / "membership.json").unlink()
    assert "belongs to no coordinator" in check_approval(hospital.home, offer).reason
    hospital.join(hospital.coordinator)
    home = hospital.home
    home.ledger.rotate(generate_key())
    assert "knows st-anne by another key" in check_approval(home, offer).reason


def test_what_the_coordinator_is_told(hospital):
    first, second, agent = hospital.offer(), hospital.offer(run="run-2"), hospital.home
    hospital.approve(first)
    hospital.approve(second)
    revoke_approval(hospital.home, "run-2")
    heard = collect_approval_notices(agent.ledger)
    assert [(a["run"], a["offer"], a["officer"]) for a in heard["approvals"]] == [
        ("run-1", first.digest, fingerprint_of(public_hex(hospital.officer)))
    ]
    assert [(w["run"], w["offer"]) for w in heard["withdrawn"]] == [("run-2", second.digest)]


@pytest.fixture(scope="module")
def approved(tmp_path_factory):
    hospital = Hospital(tmp_path_factory.mktemp("approved"))
    offer = hospital.offer()
    hospital.approve(offer)
    return hospital, offer, (hospital.path / "ledger.jsonl").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_of_an_approval_counts(approved, data):
    hospital, offer, whole = approved
    begin = whole.index(b"\n") + 1  # of the second line, the approval
    place = data.draw(st.integers(begin, len(whole) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != whole[place]))
    file = hospital.path / "ledger.jsonl"
    file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        with pytest.raises(LedgerError):
            check_approval(SiteHome.open(hospital.path), offer)
    finally:
        file.write_bytes(whole)
    assert check_approval(SiteHome.open(hospital.path), offer).is_approved


def test_terms_of_another_form_are_no_approval(hospital):
    offer = hospital.offer()
    hospital.home.ledger.append(StudyApproved(study_hash=offer.plan, terms={"offer": offer.digest}), hospital.officer)
    assert state(hospital, offer) == "pending"
