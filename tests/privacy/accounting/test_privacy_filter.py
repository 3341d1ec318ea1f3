"""The filter holds: by hand, against an adversary who adapts, and over random schedules."""

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

from pipeline.core.errors import BadBudget
from privacy.accounting.accountant import ORDERS, Event, account, noise_for, renyi
from privacy.accounting.privacy_filter import FILTER, GRID, Budget, Charge, Commitment, Decision, alone, decide, spent

BUDGET = Budget(8.0, 1e-5)
MODEST = Commitment("modest", 4.0, 0.1, 10, 20)  # epsilon 1.4 by itself
OTHER = Commitment("other", 2.0, 0.2, 5, 20)  # epsilon 5 by itself
PLANS = {plan.plan: plan for plan in (MODEST, OTHER)}


def take(plans: dict[str, Commitment], names: list[str], budget: Budget) -> tuple[list[Charge], list[Decision]]:
    """A full turn of each of the named plans; only what is allowed is charged."""
    history, decisions = [], []
    for name in names:
        wanted = Charge(name, plans[name].turn)
        decisions.append(decide(history, plans, wanted, budget))
        history += [wanted] * decisions[-1].allowed
    return history, decisions


def by_hand(events: list[Event], eps: float, budget: Budget) -> float:
    """Delta at `eps` by the condition at the top of privacy/accounting/privacy_filter.py, order by order."""
    scale = math.log(1 / budget.delta) / (budget.first or budget.epsilon)
    gaps = np.gradient(np.log(ORDERS - 1))
    near = [0.7 * scale <= a - 1 <= 2.5 * scale for a in ORDERS]
    within = sum(gap for gap, inside in zip(gaps, near, strict=True) if inside)
    total = 0.0
    for a, gap, inside, charged in zip(ORDERS, gaps, near, renyi(events), strict=True):
        weight = 0.9 * gap * inside / within + 0.1 * gap / sum(gaps)
        total += weight * a / (1 - 1 / a) ** (a - 1) * math.exp(min(600.0, (a - 1) * (eps - charged)))
    return 1 / total


def hockey_stick(eps: np.ndarray, noise: float, rate: float) -> np.ndarray:
    """Exact delta of one step for any epsilon, also below 0; a unit is removed."""
    above = np.exp(eps) > 1 - rate
    cut = noise**2 * np.log(np.where(above, np.exp(eps) - 1 + rate, 1.0) / rate) + 0.5
    tail = rate * ndtr((1 - cut) / noise) + (1 - rate - np.exp(eps)) * ndtr(-cut / noise)
    return np.where(above, tail, -np.expm1(eps))


def test_one_plan_is_charged_as_the_tightest_accountant_says() -> None:
    history, decisions = take(PLANS, ["modest"] * 20, BUDGET)
    assert len(history) == 20
    for turn, decision in enumerate(decisions, 1):
        assert decision.epsilon_after == account([Event(4.0, 0.1, 10 * turn)], 1e-5).epsilon
        assert decision.left == 8.0 - decision.epsilon_after
        assert decision.how == "pld"
    assert spent(history, PLANS, BUDGET) == account([MODEST.whole], 1e-5)
    assert decisions[-1].reason == f"spends epsilon {decisions[-1].epsilon_after:.6g} of 8 at delta 1e-05"


@pytest.mark.parametrize("budget", [BUDGET, Budget(3.0, 1e-6), Budget(8.0, 1e-5, first=2.0)])
def test_several_plans_are_charged_by_the_filter(budget: Budget) -> None:
    history = [Charge(plan.plan, plan.turn) for plan in (MODEST, OTHER, OTHER)]
    found = spent(history, PLANS, budget)
    events = [event for _, event in history]
    assert found.how == FILTER
    assert by_hand(events, found.epsilon, budget) <= budget.delta < by_hand(events, found.epsilon - 1.01 * GRID, budget)
    assert found.epsilon > account(events, budget.delta, "rdp").epsilon


def test_the_filter_costs_little_at_the_budget() -> None:
    events = [MODEST.whole, replace(OTHER, turns=60).whole]
    best = account(events, 1e-5, "rdp").epsilon
    turns = [Charge("modest", MODEST.turn)] * 20 + [Charge("other", OTHER.turn)] * 60
    assert best < spent(turns, {"modest": MODEST, "other": replace(OTHER, turns=60)}, BUDGET).epsilon < 1.07 * best


@pytest.mark.parametrize(
    ("budget", "first", "rate"),
    [(Budget(2.0, 1e-2), 1.5, 0.1), (Budget(4.0, 1e-3), 1.2, 0.2)],
)
def test_an_adversary_who_adapts_gains_nothing(budget: Budget, first: float, rate: float) -> None:
    """Seeing the first answer, they ask what then tells most, as sharply as the filter lets them."""

    def sharpest(rate: float) -> float:
        def allowed(noise: float) -> bool:
            plans = {"a": Commitment("a", first, 1.0, 1, 1), "b": Commitment("b", noise, rate, 1, 1)}
            return decide([Charge("a", plans["a"].turn)], plans, Charge("b", plans["b"].turn), budget).allowed

        low, high = 0.1, 100.0
        assert not allowed(low)
        assert allowed(high)
        while high > 1.001 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if allowed(middle) else (middle, high)
        return high

    answer = np.linspace(1 - 12 * first, 1 + 12 * first, 20_001)
    density = np.exp(-((answer - 1) ** 2) / (2 * first**2)) / (first * math.sqrt(2 * math.pi))
    left = budget.epsilon - (answer - 0.5) / first**2
    second = np.maximum(hockey_stick(left, sharpest(1.0), 1.0), hockey_stick(left, sharpest(rate), rate))
    delta = float((density * second).sum() * (answer[1] - answer[0]))
    assert budget.delta / 20 < delta < budget.delta


@pytest.mark.parametrize("eps", [1.0, 6.0])
def test_a_plan_that_fits_only_tightly_ends_within_the_budget_to_the_last_turn(eps: float) -> None:
    budget = Budget(eps, 1e-5)
    tight = Commitment("tight", noise_for(eps, 1e-5, 0.1, 300), 0.1, 10, 30)
    plans = {"tight": tight, "modest": replace(MODEST, noise=20.0)}
    assert alone(tight, budget)
    assert not alone(plans["modest"], budget)
    history, decisions = take(plans, ["tight"] * 31, budget)
    assert [decision.allowed for decision in decisions] == [True] * 30 + [False]
    assert 0.995 * eps < decisions[-1].epsilon_after <= eps
    assert "all its 30 turns" in decisions[-1].reason
    longer = plans | {"tight": replace(tight, turns=31)}
    refused = decide(history, longer, Charge("tight", tight.turn), budget)
    assert not refused.allowed
    reached = account([Event(tight.noise, 0.1, 310)], 1e-5).epsilon
    before = decisions[-1].epsilon_after
    assert refused.reason == f"would spend epsilon {reached:.6g} of {eps:g} at delta 1e-05 (spent so far {before:.6g})"
    assert refused.epsilon_after == before


def test_a_plan_that_fits_only_tightly_has_the_data_for_itself() -> None:
    tight = Commitment("tight", noise_for(8.0, 1e-5, 0.1, 300), 0.1, 10, 30)
    plans = PLANS | {"tight": tight}
    history, (first, second) = take(plans, ["tight", "modest"], BUDGET)
    assert first.allowed
    assert not second.allowed
    assert second.reason.startswith("plan tight has charged, and needs the data set for itself")
    history, (first, second) = take(plans, ["modest", "tight"], BUDGET)
    assert first.allowed
    assert not second.allowed
    assert second.reason.startswith("plan tight needs the data set for itself")
    assert "modest has charged before" in second.reason
    assert len(history) == 1


def test_two_plans_in_sequence_until_the_budget_is_spent() -> None:
    budget = Budget(6.0, 1e-5)
    history, decisions = take(PLANS, ["modest"] * 20 + ["other"] * 20 + ["modest"], budget)
    granted = [decision.allowed for decision in decisions]
    assert granted[:21] == [True] * 21
    assert granted == sorted(granted, reverse=True)
    assert 20 < len(history) < 40
    assert {decision.how for decision in decisions[:20]} == {"pld"}
    assert {decision.how for decision in decisions[20:]} == {FILTER}
    refused = decisions[len(history)]
    assert refused.reason.startswith("would spend epsilon 6.")
    assert refused.epsilon_after == spent(history, PLANS, budget).epsilon <= 6.0
    assert all(a.epsilon_after <= b.epsilon_after for a, b in pairwise(decisions))


def test_plans_that_take_turns_spend_the_same_in_any_order() -> None:
    mixed, _ = take(PLANS, ["modest", "other"] * 5, BUDGET)
    sorted_, _ = take(PLANS, ["modest"] * 5 + ["other"] * 5, BUDGET)
    assert len(mixed) == len(sorted_) == 10
    assert spent(mixed, PLANS, BUDGET) == spent(sorted_, PLANS, BUDGET)


def test_partial_work_and_repeated_turns_count_as_they_are() -> None:
    history = [Charge("modest", Event(4.0, 0.1, steps)) for steps in (10, 3, 10, 10)]
    assert spent(history, PLANS, BUDGET) == account([Event(4.0, 0.1, 33)], 1e-5)
    few = {"modest": replace(MODEST, turns=4)}
    refused = decide(history, few, Charge("modest", Event(4.0, 0.1, 1)), BUDGET)
    assert "used all its 4 turns" in refused.reason


@pytest.mark.parametrize(
    ("plan", "event", "says"),
    [
        ("stranger", Event(4.0, 0.1, 10), "plan stranger has made no commitment"),
        ("modest", Event(3.9, 0.1, 10), "noise 4 at rate 0.1, not to 3.9 at 0.1"),
        ("modest", Event(4.0, 0.2, 10), "noise 4 at rate 0.1, not to 4 at 0.2"),
        ("modest", Event(4.0, 0.1, 11), "1 to 10 steps a turn, not to 11"),
        ("modest", Event(4.0, 0.1, 0), "1 to 10 steps a turn, not to 0"),
    ],
)
def test_charges_outside_the_commitment_are_refused(plan: str, event: Event, says: str) -> None:
    history = [Charge("modest", MODEST.turn)]
    decision = decide(history, PLANS, Charge(plan, event), BUDGET)
    assert not decision.allowed
    assert says in decision.reason
    assert decision.epsilon_after == spent(history, PLANS, BUDGET).epsilon
    with pytest.raises(BadBudget, match="charge 2 breaks its commitment"):
        spent([*history, Charge(plan, event)], PLANS, BUDGET)


def test_a_plan_without_noise_is_never_allowed() -> None:
    plans = {"bare": Commitment("bare", 0.0, 0.1, 1, 1)}
    decision = decide([], plans, Charge("bare", plans["bare"].turn), BUDGET)
    assert not decision.allowed
    assert decision.epsilon_after == 0
    assert "would spend epsilon inf of 8" in decision.reason


@pytest.mark.parametrize("wrong", [(0.0, 1e-5), (math.inf, 1e-5), (1.0, 0.0), (1.0, 1.0), (1.0, 1e-5, 0.0)])
def test_bad_budgets_are_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(BadBudget, match="a budget's"):
        Budget(*wrong)


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"steps_per_turn": 0}, {"rate": 0.0}, {"noise": -1.0}])
def test_bad_commitments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadBudget):
        replace(MODEST, **wrong)


KINDS = st.sampled_from([(0.7, 0.01), (1.5, 0.05), (1.5, 0.3), (5.0, 0.3), (5.0, 1.0), (12.0, 1.0)])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, Commitment], list[Charge], Budget]:
    """Plans that come and go, with partial work, repeated turns and charges nobody committed to."""
    plans = {
        name: Commitment(name, *draw(KINDS), draw(st.sampled_from([5, 10])), draw(st.integers(1, 8)))
        for name in "abc"[: draw(st.integers(1, 3))]
    }
    charges = []
    for _ in range(draw(st.integers(1, 16))):
        name = draw(st.sampled_from(sorted(plans)))
        steps = draw(st.sampled_from([5, 10, plans[name].steps_per_turn]))
        noise = draw(st.sampled_from([plans[name].noise] * 9 + [5.0]))
        charges.append(Charge(name, Event(noise, plans[name].rate, steps)))
    return plans, charges, Budget(draw(st.floats(0.3, 12.0)), draw(st.sampled_from([1e-5, 1e-6])))


@settings(max_examples=500, deadline=None)
@given(schedules())
def test_no_schedule_ever_exceeds_its_budget(schedule: tuple[dict[str, Commitment], list[Charge], Budget]) -> None:
    plans, charges, budget = schedule
    history: list[Charge] = []
    reached = 0.0
    for wanted in charges:
        decision = decide(history, plans, wanted, budget)
        assert decision.epsilon_after >= reached
        assert decision.left == pytest.approx(budget.epsilon - decision.epsilon_after)
        if decision.allowed:
            history.append(wanted)
        else:
            assert decision.epsilon_after == reached
            assert decision == decide(history, plans, wanted, budget)
        reached = decision.epsilon_after
        assert reached == spent(history, plans, budget).epsilon <= budget.epsilon
    names = {charge.plan for charge in history}
    events = [charge.event for charge in history]
    for name in names:
        mine = [charge.event for charge in history if charge.plan == name]
        assert len(mine) <= plans[name].turns
        assert {(event.noise, event.rate) for event in mine} == {(plans[name].noise, plans[name].rate)}
    if len(names) > 1:
        assert by_hand(events, budget.epsilon, budget) <= budget.delta * (1 + 1e-9)
        assert not any(alone(plans[name], budget) for name in names)
