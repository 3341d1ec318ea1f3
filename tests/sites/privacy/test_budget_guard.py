"""The budget guard: the charges of several plans, partial work and repeated rounds never exceed the ledger's budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import TaskDeclinedError
from pipeline.protocol.messages import Message
from pipeline.protocol.tasks import LocalWork, TrainJob, TrainResult
from privacy.accounting.accountant import DpEvent, compute_epsilon
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerBudget, LedgerOpened
from privacy.ledger.summary import continuation_records
from privacy.ledger.verify import verify_ledger
from sites.governance.home import SiteHome
from sites.privacy.budget_guard import BudgetGuard, _ChargedSteps
from sites.privacy.plan import PrivacyPlan
from sites.training.unit_clipping import DpSgdParams


def make_plan(noise_multiplier: float, sampling_rate: float, max_rounds: int) -> PrivacyPlan:
    params = DpSgdParams(noise_multiplier, 1.0, "patient", 40, sampling_rate)
    return PrivacyPlan(
        dp_sgd_params=params,
        delta=1e-5,
        steps_per_round=5,
        max_rounds=max_rounds,
        epsilon=0.0,
        accountant="pld",
        num_examples=100,
    )


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    budget=st.floats(0.3, 12),
    plans=st.lists(
        st.tuples(st.sampled_from([0.8, 1.0, 1.5, 3.0]), st.sampled_from([0.05, 0.25, 1.0]), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=8),
)
def test_ledger_never_exceeds_its_epsilon_budget_under_any_schedule(tmp_path_factory, budget, plans, requests):
    """Epsilon never decreases and never exceeds the budget, and the ledger verifies."""
    folder = tmp_path_factory.mktemp("schedule")
    home = SiteHome.create(folder / "home", "a", "a:cells", "patient", LedgerBudget(epsilon=budget, delta=1e-5))
    key = keys.generate_key()
    countersigner = LedgerCountersigner(folder / "receipts", key)
    guards = [
        BudgetGuard(home, make_plan(*plan), f"study-{n}", f"plan-{n}", countersigner.countersign, keys.public_hex(key))
        for n, plan in enumerate(plans)
    ]
    epsilon_before = 0.0
    for request_index, (plan_index, steps) in enumerate(requests):
        round_number, attempt = request_index // 2, request_index % 2
        message = Message("train", round_number, {}, attempt=attempt)
        try:
            assert guards[plan_index % len(guards)].charge_round(message, steps) == steps
            is_granted = True
        except TaskDeclinedError:
            is_granted = False
        charges = home.ledger.list_charges()
        epsilon = charges[-1].total_epsilon if charges else 0.0
        assert epsilon_before <= epsilon <= budget
        is_charged = len(charges) > 0 and (charges[-1].round, charges[-1].attempt) == (round_number, attempt)
        assert is_granted == is_charged
        recomputed = compute_epsilon([DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in charges], 1e-5)
        assert recomputed <= epsilon * (1 + 1e-3) + 1e-9
        epsilon_before = epsilon
    assert verify_ledger(home.ledger.path, countersigner.last_receipt("a", "a:cells")).is_valid


def test_continued_ledger_carries_charges_but_the_coordinator_refuses_a_new_officer(tmp_path):
    """After the officer's key is lost, a new ledger names the end of the old one and carries its charges."""
    home = SiteHome.create(tmp_path / "home", "a", "a:cells", "patient", LedgerBudget(epsilon=4.0, delta=1e-5))
    key = keys.generate_key()
    countersigner = LedgerCountersigner(tmp_path / "receipts", key)
    plan = make_plan(2.0, 0.25, 4)
    guard = BudgetGuard(home, plan, "one", "plan-1", countersigner.countersign, keys.public_hex(key))
    assert guard.charge_round(Message("train", 1, {}), 5) == 5
    epsilon_before = home.ledger.list_charges()[-1].total_epsilon
    previous_ledger, carried_charges = continuation_records(home.ledger.entries())
    agent, officer = keys.generate_key(), keys.generate_key()
    opening = LedgerOpened(
        site="a",
        dataset_id="a:cells",
        privacy_unit="patient",
        budget=LedgerBudget(epsilon=4.0, delta=1e-5),
        agent_key=keys.public_hex(agent),
        officer_key=keys.public_hex(officer),
        previous_ledger=previous_ledger,
    )
    ledger = Ledger.create(tmp_path / "new.jsonl", opening, agent, officer)
    ledger.append(carried_charges, officer)
    new_guard = BudgetGuard(
        SiteHome(tmp_path, agent, ledger), plan, "two", "plan-2", countersigner.countersign, keys.public_hex(key)
    )
    with pytest.raises(
        TaskDeclinedError, match=r"^no receipt, no training"
    ) as declined:  # it remembers the old officer
        new_guard.charge_round(Message("train", 1, {}), 5)
    assert declined.value.kind == "no_receipt"
    charges = ledger.list_charges()
    assert [c.study_hash for c in charges] == ["plan-1", "plan-2"]
    assert charges[-1].total_epsilon > epsilon_before


@pytest.mark.parametrize(("max_steps", "limited"), [(None, 4), (9, 4), (3, 3)])
def test_a_job_gets_no_more_steps_than_are_charged(max_steps, limited):
    w, num_charges = torch.zeros(2), []
    charged_steps = _ChargedSteps(lambda: num_charges.append(1) or 4)
    public_job = TrainJob(w, dataset="public", max_steps=9)
    assert charged_steps.limit_job(public_job) == public_job
    assert not num_charges  # public examples cost nothing
    job = charged_steps.limit_job(TrainJob(w, max_steps=max_steps))
    assert job.max_steps == limited
    charged_steps.count_steps(job, TrainResult(w, w, LocalWork(limited, 2, 40), loss=0.5, lr_sum=None))
    assert (
        charged_steps.limit_job(TrainJob(w)).max_steps == 2
    )  # of the round's four; the second job is not charged again
    assert len(num_charges) == 1
