"""The coordinator's database: approvals, enrolment, state transitions, journal."""

import threading
from datetime import timedelta

import pytest

from pipeline.core.errors import RunFolderError
from pipeline.service.runtime.run_states import LIFECYCLE_STATES, RUN_ACTIONS, InvalidStateError
from pipeline.service.storage.accounts import EnrolmentRefusal, EnrolmentRequest
from pipeline.service.storage.store import CoordinatorStore
from privacy.ledger.records import LedgerReceipt
from tests.support.service_factory import FakeClock

DIGEST = "d" * 64


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(tmp_path, clock):
    store = CoordinatorStore(f"sqlite:///{tmp_path / 'x.db'}", clock)
    for number, site in enumerate("abc"):
        token, _ = store.accounts.create_invitation(site, 1, "lead")
        store.accounts.enrol_site(token, EnrolmentRequest(site, f"{number}" * 64, "f" * 64, "1"))
    store.add_run(
        "r",
        name="r",
        strategy="fedavg",
        rounds=4,
        digest=DIGEST,
        min_sites=2,
        actor="lead",
        sites={s.name: s.key for s in store.list_sites()},
    )
    yield store
    store.close()


def approve(store, site, hours=1.0, digest=DIGEST):
    now = store.clock()
    return store.record_approval("r", site, digest, now, now + timedelta(hours=hours), "officer")


def test_run_begins_when_all_sites_have_approved(store):
    for site in "ab":
        assert approve(store, site)
        assert store.find_run("r").state == "offered"
    assert approve(store, "c")
    run = store.find_run("r")
    assert (run.state, run.started, run.sites) == ("starting", store.clock(), ["a", "b", "c"])
    assert store.approved_sites("r") == {"a", "b", "c"}


def test_lead_can_begin_a_run_with_min_sites_approvals(store):
    approve(store, "a")
    with pytest.raises(InvalidStateError, match="approval of 2 sites and has 1"):
        store.apply_action("r", "begin", "lead")
    approve(store, "b")
    assert store.apply_action("r", "begin", "lead").state == "starting"


def test_approval_ends_by_expiry_revocation_and_leaving(store, clock):
    approve(store, "a", hours=1)
    approve(store, "b", hours=3)
    assert store.approved_sites("r") == {"a", "b"}
    clock.advance(hours=2)
    assert store.approved_sites("r") == {"b"}
    assert store.record_revocation("r", "b", clock())
    assert store.approved_sites("r") == set()
    clock.advance(minutes=1)
    approve(store, "b")
    assert store.approved_sites("r") == {"b"}
    assert store.record_departure("b")
    assert store.approved_sites("r") == set()


def test_repeated_old_approval_does_not_undo_a_revocation(store, clock):
    first = clock()
    approve(store, "a")
    clock.advance(minutes=1)
    store.record_revocation("r", "a", clock())
    store.record_approval("r", "a", DIGEST, first, None, "officer")
    assert store.approved_sites("r") == set()


def test_approval_of_another_offer_does_not_count(store):
    assert not approve(store, "a", digest="e" * 64)
    assert not store.record_approval("other", "a", DIGEST, store.clock(), None, "")
    assert store.approved_sites("r") == set()


def test_approval_under_an_old_key_does_not_count(store):
    approve(store, "a")
    assert store.record_departure("a", "lead", removed=True)
    token, _ = store.accounts.create_invitation("a", 1, "lead")
    assert isinstance(store.accounts.enrol_site(token, EnrolmentRequest("a", "9" * 64, "f" * 64, "1")), str)
    assert store.approved_sites("r") == set()
    assert not approve(store, "a"), "the offer has the old key"


def test_concurrent_enrolments_with_one_invitation_succeed_once(store):
    token, _ = store.accounts.create_invitation("d", 1, "lead")
    results, barrier = [], threading.Barrier(6)

    def enrol(number):
        barrier.wait()
        results.append(store.accounts.enrol_site(token, EnrolmentRequest("d", f"{number:064x}", "f" * 64, "1")))

    threads = [threading.Thread(target=enrol, args=(100 + n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(result, str) for result in results) == 1
    assert sum(isinstance(result, EnrolmentRefusal) for result in results) == 5


TRANSITIONS = {
    "begin": {"offered": "starting"},
    "pause": {"starting": "pausing", "running": "pausing", "waiting": "pausing"},
    "resume": {"paused": "starting", "stopped": "starting", "failed": "starting"},
    "stop": {
        "offered": "stopped",
        "starting": "stopping",
        "running": "stopping",
        "waiting": "stopping",
        "pausing": "stopping",
        "paused": "stopped",
    },
}


@pytest.mark.parametrize("action", sorted(RUN_ACTIONS))
@pytest.mark.parametrize("state", LIFECYCLE_STATES)
def test_every_action_in_every_state(store, action, state):
    for site in "abc":
        approve(store, site)
    store.set_run_state("r", state)
    requested_states = []
    if state in TRANSITIONS[action]:
        run = store.apply_action("r", action, "lead", on_change=lambda row: requested_states.append(row.desired_state))
        assert (run.state, requested_states) == (TRANSITIONS[action][state], [RUN_ACTIONS[action].desired_state])
    elif state in RUN_ACTIONS[action].no_op_states:
        run = store.apply_action("r", action, "lead", on_change=lambda row: requested_states.append(row.desired_state))
        assert (run.state, requested_states) == (state, [])
    else:
        with pytest.raises(InvalidStateError, match=f"r is {state}"):
            store.apply_action("r", action, "lead")
        assert store.find_run("r").state == state


def test_run_stopped_before_it_began_is_offered_again(store):
    store.apply_action("r", "stop", "lead")
    assert store.find_run("r").finished is not None
    assert store.apply_action("r", "resume", "lead").state == "offered"
    assert store.find_run("r").finished is None


def test_supervisor_does_not_overwrite_a_leads_request(store):
    store.set_run_state("r", "running")
    store.apply_action("r", "stop", "lead")
    assert not store.set_run_state("r", "running", expected_states=["starting", "waiting"])
    assert store.find_run("r").state == "stopping"
    assert store.set_run_state("r", "stopped", "as asked", expected_states=["stopping"])
    assert (store.find_run("r").reason, store.find_run("r").desired_state) == ("as asked", "stop")


def test_journal_has_actors_and_actions(store):
    approve(store, "a")
    store.apply_action("r", "stop", "eva")
    assert [(e.actor, e.action) for e in store.list_events(3)] == [
        ("lead", "run offered"),
        ("a", "approved"),
        ("eva", "run stopped"),
    ]


def test_receipt_is_recorded_once(store):
    receipt = LedgerReceipt(
        site="a", dataset_id="x", index=3, head="1" * 64, time="t", coordinator_key="2" * 64, signature="3" * 128
    )
    store.record_receipt(receipt)
    store.record_receipt(receipt)
    assert [(r.site, r.index) for r in store.list_receipts()] == [("a", 3)]


def test_unknown_names_are_refused_with_a_remedy(store):
    with pytest.raises(RunFolderError, match="coordinator status"):
        store.set_desired_state("nothing", "run")
    with pytest.raises(RunFolderError, match="coordinator invite"):
        store.record_heartbeat("nobody", {})
