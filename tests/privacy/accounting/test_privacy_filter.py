"""The privacy filter by hand, against an adaptive adversary, and over random schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from pipeline.core.errors import BudgetError
from privacy.accounting.accountant import (
    RDP_ORDERS,
    DpEvent,
    calibrate_noise_multiplier,
    compute_privacy_spent,
    renyi_divergences,
)
from privacy.accounting.privacy_filter import (
    EPSILON_GRID,
    RDP_FILTER,
    FilterBudget,
    FilterDecision,
    PlanCharge,
    PlannedSpending,
    check_charge,
    compute_spent,
    needs_exclusive_use,
)

BUDGET = FilterBudget(8.0, 1e-5)
MODEST = PlannedSpending("modest", 4.0, 0.1, 10, 20)  # epsilon 1.4 by itself
OTHER = PlannedSpending("other", 2.0, 0.2, 5, 20)  # epsilon 5 by itself
PLANS = {plan.study_hash: plan for plan in (MODEST, OTHER)}


def charge_rounds(
    plans: dict[str, PlannedSpending], names: list[str], budget: FilterBudget
) -> tuple[list[PlanCharge], list[FilterDecision]]:
    """Requests a full round of each named study; only allowed ones are charged."""
    history, decisions = [], []
    for name in names:
        requested = PlanCharge(name, plans[name].round_event)
        decisions.append(check_charge(history, plans, requested, budget))
        history += [requested] * decisions[-1].is_allowed
    return history, decisions


def filter_delta_by_hand(events: list[DpEvent], eps: float, budget: FilterBudget) -> float:
    """Delta at `eps` by the condition at the top of privacy/accounting/privacy_filter.py, order by order."""
    scale = math.log(1 / budget.delta) / (budget.initial_epsilon or budget.epsilon)
    gaps = np.gradient(np.log(RDP_ORDERS - 1))
    near = [0.7 * scale <= a - 1 <= 2.5 * scale for a in RDP_ORDERS]
    within = sum(gap for gap, inside in zip(gaps, near, strict=True) if inside)
    total = 0.0
    for a, gap, inside, charged in zip(RDP_ORDERS, gaps, near, renyi_divergences(events), strict=True):
        weight = 0.9 * gap * inside / within + 0.1 * gap / sum(gaps)
        total += weight * a / (1 - 1 / a) ** (a - 1) * math.exp(min(600.0, (a - 1) * (eps - charged)))
    return 1 / total


def step_delta(eps: np.ndarray, noise: float, rate: float) -> np.ndarray:
    """Exact delta of one step for any epsilon, also below 0; a unit is removed."""
    above = np.exp(eps) > 1 - rate
    cut = noise**2 * np.log(np.where(above, np.exp(eps) - 1 + rate, 1.0) / rate) + 0.5
    tail = rate * ndtr((1 - cut) / noise) + (1 - rate - np.exp(eps)) * ndtr(-cut / noise)
    return np.where(above, tail, -np.expm1(eps))


def test_one_study_is_charged_by_the_tightest_accountant() -> None:
    history, decisions = charge_rounds(PLANS, ["modest"] * 20, BUDGET)
    assert len(history) == 20
    for num_rounds, decision in enumerate(decisions, 1):
        assert decision.epsilon_after == compute_privacy_spent([DpEvent(4.0, 0.1, 10 * num_rounds)], 1e-5).epsilon
        assert decision.epsilon_left == 8.0 - decision.epsilon_after
        assert decision.accountant == "pld"
    assert compute_spent(history, PLANS, BUDGET) == compute_privacy_spent([MODEST.total_event], 1e-5)
    assert decisions[-1].reason == f"spends epsilon {decisions[-1].epsilon_after:.6g} of 8 at delta 1e-05"


@pytest.mark.parametrize("budget", [BUDGET, FilterBudget(3.0, 1e-6), FilterBudget(8.0, 1e-5, initial_epsilon=2.0)])
def test_several_studies_are_charged_by_the_rdp_filter(budget: FilterBudget) -> None:
    history = [PlanCharge(plan.study_hash, plan.round_event) for plan in (MODEST, OTHER, OTHER)]
    found = compute_spent(history, PLANS, budget)
    events = [event for _, event in history]
    assert found.accountant == RDP_FILTER
    assert (
        filter_delta_by_hand(events, found.epsilon, budget)
        <= budget.delta
        < filter_delta_by_hand(events, found.epsilon - 1.01 * EPSILON_GRID, budget)
    )
    assert found.epsilon > compute_privacy_spent(events, budget.delta, "rdp").epsilon


def test_rdp_filter_costs_little_at_the_budget() -> None:
    events = [MODEST.total_event, replace(OTHER, max_participations=60).total_event]
    best = compute_privacy_spent(events, 1e-5, "rdp").epsilon
    charges = [PlanCharge("modest", MODEST.round_event)] * 20 + [PlanCharge("other", OTHER.round_event)] * 60
    assert (
        best
        < compute_spent(charges, {"modest": MODEST, "other": replace(OTHER, max_participations=60)}, BUDGET).epsilon
        < 1.07 * best
    )


@pytest.mark.parametrize(
    ("budget", "first", "rate"),
    [(FilterBudget(2.0, 1e-2), 1.5, 0.1), (FilterBudget(4.0, 1e-3), 1.2, 0.2)],
)
def test_adaptive_adversary_stays_within_delta(budget: FilterBudget, first: float, rate: float) -> None:
    """The adversary sees the first release and chooses the most revealing second one that the filter allows."""

    def smallest_allowed_noise(rate: float) -> float:
        def allowed(noise: float) -> bool:
            plans = {"a": PlannedSpending("a", first, 1.0, 1, 1), "b": PlannedSpending("b", noise, rate, 1, 1)}
            return check_charge(
                [PlanCharge("a", plans["a"].round_event)], plans, PlanCharge("b", plans["b"].round_event), budget
            ).is_allowed

        low, high = 0.1, 100.0
        assert not allowed(low)
        assert allowed(high)
        while high > 1.001 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if allowed(middle) else (middle, high)
        return high

    output = np.linspace(1 - 12 * first, 1 + 12 * first, 20_001)
    density = np.exp(-((output - 1) ** 2) / (2 * first**2)) / (first * math.sqrt(2 * math.pi))
    left = budget.epsilon - (output - 0.5) / first**2
    second = np.maximum(
        step_delta(left, smallest_allowed_noise(1.0), 1.0), step_delta(left, smallest_allowed_noise(rate), rate)
    )
    delta = float((density * second).sum() * (output[1] - output[0]))
    assert budget.delta / 20 < delta < budget.delta


@pytest.mark.parametrize("eps", [1.0, 6.0])
def test_exclusive_study_spends_the_budget_to_its_last_round(eps: float) -> None:
    budget = FilterBudget(eps, 1e-5)
    tight = PlannedSpending("tight", calibrate_noise_multiplier(eps, 1e-5, 0.1, 300), 0.1, 10, 30)
    plans = {"tight": tight, "modest": replace(MODEST, noise_multiplier=20.0)}
    assert needs_exclusive_use(tight, budget)
    assert not needs_exclusive_use(plans["modest"], budget)
    history, decisions = charge_rounds(plans, ["tight"] * 31, budget)
    assert [decision.is_allowed for decision in decisions] == [True] * 30 + [False]
    assert 0.995 * eps < decisions[-1].epsilon_after <= eps
    assert "all its 30 rounds" in decisions[-1].reason
    longer = plans | {"tight": replace(tight, max_participations=31)}
    refused = check_charge(history, longer, PlanCharge("tight", tight.round_event), budget)
    assert not refused.is_allowed
    spent = compute_privacy_spent([DpEvent(tight.noise_multiplier, 0.1, 310)], 1e-5).epsilon
    before = decisions[-1].epsilon_after
    assert refused.reason == f"would spend epsilon {spent:.6g} of {eps:g} at delta 1e-05 (spent so far {before:.6g})"
    assert refused.epsilon_after == before


def test_exclusive_study_excludes_other_studies() -> None:
    tight = PlannedSpending("tight", calibrate_noise_multiplier(8.0, 1e-5, 0.1, 300), 0.1, 10, 30)
    plans = PLANS | {"tight": tight}
    history, (first, second) = charge_rounds(plans, ["tight", "modest"], BUDGET)
    assert first.is_allowed
    assert not second.is_allowed
    assert second.reason.startswith("study tight has charged, and needs exclusive use of the data set")
    history, (first, second) = charge_rounds(plans, ["modest", "tight"], BUDGET)
    assert first.is_allowed
    assert not second.is_allowed
    assert second.reason.startswith("study tight needs exclusive use of the data set")
    assert "modest has charged before" in second.reason
    assert len(history) == 1


def test_two_studies_in_sequence_until_the_budget_is_spent() -> None:
    budget = FilterBudget(6.0, 1e-5)
    history, decisions = charge_rounds(PLANS, ["modest"] * 20 + ["other"] * 20 + ["modest"], budget)
    is_allowed = [decision.is_allowed for decision in decisions]
    assert is_allowed[:21] == [True] * 21
    assert is_allowed == sorted(is_allowed, reverse=True)
    assert 20 < len(history) < 40
    assert {decision.accountant for decision in decisions[:20]} == {"pld"}
    assert {decision.accountant for decision in decisions[20:]} == {RDP_FILTER}
    refused = decisions[len(history)]
    assert refused.reason.startswith("would spend epsilon 6.")
    assert refused.epsilon_after == compute_spent(history, PLANS, budget).epsilon <= 6.0
    assert all(a.epsilon_after <= b.epsilon_after for a, b in pairwise(decisions))


def test_interleaved_studies_spend_the_same_in_any_order() -> None:
    mixed, _ = charge_rounds(PLANS, ["modest", "other"] * 5, BUDGET)
    sorted_, _ = charge_rounds(PLANS, ["modest"] * 5 + ["other"] * 5, BUDGET)
    assert len(mixed) == len(sorted_) == 10
    assert compute_spent(mixed, PLANS, BUDGET) == compute_spent(sorted_, PLANS, BUDGET)


def test_partial_work_and_repeated_rounds_count() -> None:
    history = [PlanCharge("modest", DpEvent(4.0, 0.1, steps)) for steps in (10, 3, 10, 10)]
    assert compute_spent(history, PLANS, BUDGET) == compute_privacy_spent([DpEvent(4.0, 0.1, 33)], 1e-5)
    few = {"modest": replace(MODEST, max_participations=4)}
    refused = check_charge(history, few, PlanCharge("modest", DpEvent(4.0, 0.1, 1)), BUDGET)
    assert "used all its 4 rounds" in refused.reason


@pytest.mark.parametrize(
    ("plan", "event", "message"),
    [
        ("stranger", DpEvent(4.0, 0.1, 10), "study stranger has made no commitment"),
        ("modest", DpEvent(3.9, 0.1, 10), "noise multiplier 4 at sampling rate 0.1, not to 3.9 at 0.1"),
        ("modest", DpEvent(4.0, 0.2, 10), "noise multiplier 4 at sampling rate 0.1, not to 4 at 0.2"),
        ("modest", DpEvent(4.0, 0.1, 11), "1 to 10 steps per round, not to 11"),
        ("modest", DpEvent(4.0, 0.1, 0), "1 to 10 steps per round, not to 0"),
    ],
)
def test_charges_outside_the_commitment_are_refused(plan: str, event: DpEvent, message: str) -> None:
    history = [PlanCharge("modest", MODEST.round_event)]
    decision = check_charge(history, PLANS, PlanCharge(plan, event), BUDGET)
    assert not decision.is_allowed
    assert message in decision.reason
    assert decision.epsilon_after == compute_spent(history, PLANS, BUDGET).epsilon
    with pytest.raises(BudgetError, match="charge 2 breaks its commitment"):
        compute_spent([*history, PlanCharge(plan, event)], PLANS, BUDGET)


def test_study_without_noise_is_never_allowed() -> None:
    plans = {"noiseless": PlannedSpending("noiseless", 0.0, 0.1, 1, 1)}
    decision = check_charge([], plans, PlanCharge("noiseless", plans["noiseless"].round_event), BUDGET)
    assert not decision.is_allowed
    assert decision.epsilon_after == 0
    assert "would spend epsilon inf of 8" in decision.reason


@pytest.mark.parametrize("wrong", [(0.0, 1e-5), (math.inf, 1e-5), (1.0, 0.0), (1.0, 1.0), (1.0, 1e-5, 0.0)])
def test_invalid_budgets_are_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(BudgetError, match="a budget's"):
        FilterBudget(*wrong)


@pytest.mark.parametrize(
    "wrong", [{"max_participations": 0}, {"steps_per_round": 0}, {"sampling_rate": 0.0}, {"noise_multiplier": -1.0}]
)
def test_invalid_commitments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BudgetError):
        replace(MODEST, **wrong)


KINDS = st.sampled_from([(0.7, 0.01), (1.5, 0.05), (1.5, 0.3), (5.0, 0.3), (5.0, 1.0), (12.0, 1.0)])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, PlannedSpending], list[PlanCharge], FilterBudget]:
    """Interleaved studies with partial work, repeated rounds and charges outside their commitment."""
    plans = {
        name: PlannedSpending(name, *draw(KINDS), draw(st.sampled_from([5, 10])), draw(st.integers(1, 8)))
        for name in "abc"[: draw(st.integers(1, 3))]
    }
    charges = []
    for _ in range(draw(st.integers(1, 16))):
        name = draw(st.sampled_from(sorted(plans)))
        steps = draw(st.sampled_from([5, 10, plans[name].steps_per_round]))
        noise = draw(st.sampled_from([plans[name].noise_multiplier] * 9 + [5.0]))
        charges.append(PlanCharge(name, DpEvent(noise, plans[name].sampling_rate, steps)))
    return plans, charges, FilterBudget(draw(st.floats(0.3, 12.0)), draw(st.sampled_from([1e-5, 1e-6])))


@settings(max_examples=500, deadline=None)
@given(schedules())
def test_no_schedule_exceeds_its_budget(
    schedule: tuple[dict[str, PlannedSpending], list[PlanCharge], FilterBudget],
) -> None:
    plans, charges, budget = schedule
    history: list[PlanCharge] = []
    last_epsilon = 0.0
    for requested in charges:
        decision = check_charge(history, plans, requested, budget)
        assert decision.epsilon_after >= last_epsilon
        assert decision.epsilon_left == pytest.approx(budget.epsilon - decision.epsilon_after)
        if decision.is_allowed:
            history.append(requested)
        else:
            assert decision.epsilon_after == last_epsilon
            assert decision == check_charge(history, plans, requested, budget)
        last_epsilon = decision.epsilon_after
        assert last_epsilon == compute_spent(history, plans, budget).epsilon <= budget.epsilon
    names = {charge.study_hash for charge in history}
    events = [charge.event for charge in history]
    for name in names:
        mine = [charge.event for charge in history if charge.study_hash == name]
        assert len(mine) <= plans[name].max_participations
        assert {(event.noise_multiplier, event.sampling_rate) for event in mine} == {
            (plans[name].noise_multiplier, plans[name].sampling_rate)
        }
    if len(names) > 1:
        assert filter_delta_by_hand(events, budget.epsilon, budget) <= budget.delta * (1 + 1e-9)
        assert not any(needs_exclusive_use(plans[name], budget) for name in names)
