"""Whole runs under privacy: budgets hold to the last step and across studies, sums are secret, nobody is charged twice."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from pipeline.aggregation.requests import RoundRequest
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import IncompatibleStudyError, MessageError
from pipeline.protocol.messages import Message, RoundPolicy, SiteId
from pipeline.protocol.serialization import deserialize_message
from pipeline.runs.simulation import Simulation, build_simulation, run_simulation
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, compute_epsilon
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerBudget, PrivacyCharge
from privacy.ledger.verify import verify_ledger
from sites.governance.home import SiteHome
from sites.privacy.budget_guard import BudgetGuard
from sites.privacy.plan import PrivacyPlan
from sites.training.unit_clipping import DpSgdParams
from tests.conftest import final_weights

SINGLE = {"unit": "example", "epsilon": 4.0, "clip": 0.5}


def at_site(**more: Any) -> dict[str, Any]:
    return {"dp_sgd": SINGLE | more}


def charges(run_folder: Path, site: str) -> list[PrivacyCharge]:
    return Ledger.open(run_folder / "homes" / site / "ledger.jsonl").list_charges()


def test_the_budget_is_respected_to_the_last_step_and_the_ledger_agrees_with_an_outside_accountant(moons, go):
    folder, results = go(moons(privacy=at_site()))
    assert results["stopped"] == "finished"
    for site in ("site-01", "site-04"):
        spent = charges(folder.path, site)
        assert [c.round for c in spent] == [1, 2, 3, 4, 5, 6]
        assert [c.steps for c in spent] == [4] * 6  # ceil(32 / 8), where int(1 / rate) would do too
        assert 3.95 < spent[-1].total_epsilon <= 4.0
        assert all(a.total_epsilon < b.total_epsilon for a, b in itertools.pairwise(spent))
        outside = RdpAccountant()
        for c in spent:
            step = dp_accounting.PoissonSampledDpEvent(
                c.sampling_rate, dp_accounting.GaussianDpEvent(c.noise_multiplier)
            )
            outside.compose(step, c.steps)
        assert spent[-1].total_epsilon <= outside.get_epsilon(1e-5) <= 1.25 * spent[-1].total_epsilon
        anchor = LedgerCountersigner(folder.path / "coordinator/receipts", keys.generate_key()).last_receipt(
            site, f"{site}:moons"
        )
        verdict = verify_ledger(folder.path / "homes" / site / "ledger.jsonl", anchor)
        assert verdict.is_valid
        assert anchor is not None
    assert folder.rounds()[-1]["epsilon"]["site-01"] == charges(folder.path, "site-01")[-1].total_epsilon


def test_steps_do_not_lose_the_last_short_batch(moons, go):
    """32 examples in batches of 9 are 4 steps; int(1 / (9 / 32)) would be 3."""
    folder, _ = go(moons(rounds=2, local={"lr": 0.1, "batch_size": 9, "epochs": 2}, privacy=at_site()))
    spent = charges(folder.path, "site-01")
    assert [c.steps for c in spent] == [8, 8]
    assert spent[0].sampling_rate == 9 / 32


def test_too_small_a_budget_ends_the_run_early_and_keeps_the_best_model(moons, go):
    folder, results = go(moons(rounds=20, privacy=at_site(budget=2.0)))
    assert results["stopped"] == "early: every site's privacy budget is spent"
    assert 1 <= results["best_round"] < results["rounds"] < 20
    last = folder.rounds()[-1]
    assert set(last["missed"]) == {"site-01", "site-02", "site-03", "site-04"}
    assert all(why.startswith("privacy budget: would spend epsilon") for why in last["missed"].values())
    for site in last["missed"]:
        spent = charges(folder.path, site)
        assert spent[-1].total_epsilon <= 2.0
        assert compute_epsilon(
            [DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in spent], 1e-5
        ) == pytest.approx(spent[-1].total_epsilon)
        again = DpEvent(spent[0].noise_multiplier, spent[0].sampling_rate, sum(c.steps for c in spent) + spent[0].steps)
        assert compute_epsilon([again], 1e-5) > 2.0  # one turn more would not have fitted
        kinds = [e.kind for e in Ledger.open(folder.path / "homes" / site / "ledger.jsonl").entries()]
        assert kinds[-1] == "refusal"
    assert (folder.path / "models" / "global.safetensors").is_file()


def test_after_its_participations_a_site_sits_out(moons, go):
    folder, results = go(moons(privacy=at_site(participations=2)))
    assert [len(r["counted"]) for r in folder.rounds()[1:]] == [4, 4, 0]
    assert "used all its 2 turns" in folder.rounds()[-1]["missed"]["site-01"]
    assert results["rounds"] == 3
    assert 3.9 < charges(folder.path, "site-01")[-1].total_epsilon <= 4.0  # less noise: solved for two turns


def test_each_site_may_promise_something_else(moons, go):
    folder, _ = go(moons(rounds=2, privacy=at_site(epsilon=[1.0, 2.0, 4.0, 8.0])))
    told = json.loads((folder.path / "privacy.json").read_text())["dp_sgd"]
    noise = [told[f"site-0{n}"]["noise"] for n in (1, 2, 3, 4)]
    assert noise == sorted(noise, reverse=True)
    assert [round(charges(folder.path, f"site-0{n}")[-1].total_epsilon) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]


def test_given_noise_epsilon_follows(moons, go):
    folder, _ = go(moons(rounds=2, privacy={"dp_sgd": {"privacy_unit": "example", "noise_multiplier": 2.0}}))
    told = json.loads((folder.path / "privacy.json").read_text())["dp_sgd"]["site-01"]
    assert told["noise"] == 2.0
    assert told["epsilon"] == pytest.approx(compute_epsilon([DpEvent(2.0, 0.25, 8)], 1e-5))


def test_a_training_loss_has_no_mechanism_and_stays_at_the_site(moons, go):
    folder, _ = go(moons(rounds=2, privacy=at_site()))
    assert all(record["train_loss"] == {} for record in folder.rounds())


class Killed(Exception):
    pass


def killed_after_training(study: Study, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """Stops when all sites have trained in this turn and the coordinator has not yet written anything down."""
    from pipeline.coordinator.round_loop import RoundLoop

    close = RoundLoop._finish_round

    def stop(self: RoundLoop, progress: Any, *rest: Any) -> Any:
        if progress.round == turn:
            raise Killed
        return close(self, progress, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RoundLoop, "_close", stop)
        with pytest.raises(Killed):
            run_simulation(study, folder)


def test_a_repeated_turn_resends_the_noised_bytes_and_is_not_charged_again(moons, tmp_path, monkeypatch):
    study = moons(privacy=at_site())
    folder = RunFolder.create(tmp_path / "run", study)
    killed_after_training(study, folder, monkeypatch, turn=3)
    assert [c.round for c in charges(folder.path, "site-01")] == [1, 2, 3]
    results = run_simulation(study, folder)
    assert results["rounds"] == 6
    assert [(c.round, c.attempt) for c in charges(folder.path, "site-01")] == [(n, 0) for n in range(1, 7)]


def test_a_repeated_turn_whose_answer_is_lost_is_charged_again(moons, tmp_path, monkeypatch):
    study = moons(privacy=at_site())
    folder = RunFolder.create(tmp_path / "run", study)
    killed_after_training(study, folder, monkeypatch, turn=3)
    shutil.rmtree(folder.path / "homes" / "site-01" / "outbox")
    run_simulation(study, folder)
    spent = charges(folder.path, "site-01")
    assert [(c.round, c.attempt) for c in spent] == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (5, 0)]
    assert spent[-1].total_epsilon <= 4.0
    assert "used all its 6 turns" in folder.load_rounds()[6]["missed"]["site-01"]
    assert "site-02" in folder.load_rounds()[6]["counted"]


def test_restoring_an_old_ledger_refunds_nothing(moons, tmp_path, monkeypatch):
    study = moons(privacy=at_site())
    folder = RunFolder.create(tmp_path / "run", study)
    home = folder.path / "homes" / "site-01"
    killed_after_training(study, folder, monkeypatch, turn=2)
    old = (home / "ledger.jsonl").read_bytes()
    killed_after_training(study, RunFolder.open(folder.path), monkeypatch, turn=4)
    (home / "ledger.jsonl").write_bytes(old)
    shutil.rmtree(home / "outbox")
    run_simulation(study, RunFolder.open(folder.path))
    assert "site-01" not in folder.load_rounds()[4]["counted"]
    assert folder.load_rounds()[4]["missed"]["site-01"].startswith("no receipt, no training")


def test_budgets_hold_across_studies(moons, tmp_path):
    """Each study alone would fit; the second is admitted by the filter, and cut off where the sum would pass."""
    homes = tmp_path / "homes"
    base = at_site(epsilon=None, noise=3.0, budget=3.0)
    first, second = (moons(rounds=8, seed=seed, privacy=base) for seed in (3, 4))
    assert first.hash != second.hash
    one = run_simulation(first, RunFolder.create(tmp_path / "one", first), homes_folder=homes)
    two = run_simulation(second, RunFolder.create(tmp_path / "two", second), homes_folder=homes)
    assert one["stopped"] == "finished"
    assert two["stopped"].startswith("early")
    ledger = Ledger.open(homes / "site-01" / "ledger.jsonl")
    spent = ledger.list_charges()
    assert {c.study_hash for c in spent} == {first.hash, second.hash}
    assert spent[-1].accountant == "rdp filter"
    assert all(a.total_epsilon <= b.total_epsilon for a, b in itertools.pairwise(spent))
    assert (
        compute_epsilon([DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in spent], 1e-5)
        <= spent[-1].total_epsilon
        <= 3.0
    )


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    budget=some.floats(0.3, 12),
    plans=some.lists(
        some.tuples(some.sampled_from([0.8, 1.0, 1.5, 3.0]), some.sampled_from([0.05, 0.25, 1.0]), some.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    asked=some.lists(some.tuples(some.integers(0, 2), some.integers(1, 5)), min_size=1, max_size=8),
)
def test_whatever_the_schedule_the_ledger_never_passes_its_budget(tmp_path_factory, budget, plans, asked):
    """Several plans, partial work, repeated turns: spent <= budget, never less than before, and the ledger verifies."""
    folder = tmp_path_factory.mktemp("schedule")
    home = SiteHome.create(folder / "home", "a", "a:cells", "patient", LedgerBudget(epsilon=budget, delta=1e-5))
    key = keys.generate_key()
    signer = LedgerCountersigner(folder / "receipts", key)
    guards = [
        BudgetGuard(
            home,
            PrivacyPlan(DpSgdParams(noise, 1.0, "patient", 40, rate), 1e-5, 5, turns, 0.0, "pld", 100),
            f"study-{n}",
            f"plan-{n}",
            signer.countersign,
            keys.public_hex(key),
        )
        for n, (noise, rate, turns) in enumerate(plans)
    ]
    before = 0.0
    for turn, (which, steps) in enumerate(asked):
        refused = guards[which % len(guards)].charge_round(Message("train", turn // 2, {}, attempt=turn % 2), steps)
        spent = home.ledger.list_charges()
        now = spent[-1].total_epsilon if spent else 0.0
        assert before <= now <= budget
        assert (refused is None) == (len(spent) > 0 and (spent[-1].round, spent[-1].attempt) == (turn // 2, turn % 2))
        outside = compute_epsilon([DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in spent], 1e-5)
        assert outside <= now * (1 + 1e-3) + 1e-9
        before = now
    assert verify_ledger(home.ledger.path, signer.last_receipt("a", "a:cells")).is_valid


def test_a_ledger_that_continues_another_goes_on_where_it_ended(tmp_path):
    """The officer's key is lost: a new ledger names the end of the old one and carries its charges."""
    from privacy.ledger.records import LedgerOpened
    from privacy.ledger.summary import continuation_records

    home = SiteHome.create(tmp_path / "home", "a", "a:cells", "patient", LedgerBudget(epsilon=4.0, delta=1e-5))
    key = keys.generate_key()
    signer = LedgerCountersigner(tmp_path / "receipts", key)
    made = PrivacyPlan(DpSgdParams(2.0, 1.0, "patient", 40, 0.25), 1e-5, 5, 4, 0.0, "pld", 100)
    first = BudgetGuard(home, made, "one", "plan-1", signer.countersign, keys.public_hex(key))
    assert first.charge_round(Message("train", 1, {}), 5) is None
    before = home.ledger.list_charges()[-1].total_epsilon
    there, carried = continuation_records(home.ledger.entries())
    agent, officer = keys.generate_key(), keys.generate_key()
    opening = LedgerOpened(
        site="a",
        dataset_id="a:cells",
        privacy_unit="patient",
        budget=LedgerBudget(epsilon=4.0, delta=1e-5),
        agent_key=keys.public_hex(agent),
        officer_key=keys.public_hex(officer),
        previous_ledger=there,
    )
    ledger = Ledger.create(tmp_path / "new.jsonl", opening, agent, officer)
    ledger.append(carried, officer)
    again = BudgetGuard(
        SiteHome(tmp_path, agent, ledger), made, "two", "plan-2", signer.countersign, keys.public_hex(key)
    )
    said = again.charge_round(Message("train", 1, {}), 5)
    spent = ledger.list_charges()
    assert [c.study_hash for c in spent] == ["plan-1", "plan-2"]
    assert spent[-1].total_epsilon > before
    # the coordinator remembers the old officer, and lets nobody replace him on the quiet
    assert said is not None
    assert said.startswith("no receipt, no training")


# -- secure sums


def masked(moons: Any, **sections: Any) -> tuple[Study, Study]:
    plain = moons(rounds=3, **sections)
    return plain, plain.model_copy(
        update={"privacy": moons(privacy={"secure_aggregation": {"max_update_norm": 10.0, "max_examples": 64}}).privacy}
    )


@pytest.mark.parametrize(
    "strategy", ["fedavg", {"name": "fedprox", "mu": 0.5}, "scaffold", "fednova", "qfedavg", "fedopt", "ditto"]
)
def test_a_secure_sum_is_the_sum(moons, go, strategy):
    plain, secret = masked(moons, strategy=strategy, sites={"count": 5})
    (one, _), (two, results) = go(plain, "plain"), go(secret, "secret")
    torch.testing.assert_close(final_weights(one), final_weights(two), rtol=1e-4, atol=1e-5)
    for record in two.rounds()[1:]:
        assert len(record["counted"]) == 5
        assert record["work"] == record["train_loss"] == {}  # nobody knows a single site's
    assert results["traffic"]["up"] > 0


class Dropping:
    """An engine on which sites vanish in the middle of a secure sum."""

    def __init__(self, inner: Any, gone: Mapping[str, set[SiteId]]) -> None:
        self.inner, self.gone = inner, gone

    def exchange(self, parcels: Mapping[SiteId, bytes], wait: RoundPolicy) -> Iterator[tuple[SiteId, bytes]]:
        tasks = {site: deserialize_message(parcel).task for site, parcel in parcels.items()}
        there = {s: p for s, p in parcels.items() if s not in self.gone.get(tasks[s], set())}
        yield from self.inner.exchange(there, wait)


def ask(sim: Simulation, gone: Mapping[str, set[SiteId]], attempt: int = 0, turn: int = 1) -> tuple[Any, RoundRequest]:
    c = sim.round_loop
    asking = RoundRequest(
        Dropping(sim.engine, gone),
        c.run_jobs,
        "train",
        turn,
        attempt,
        RoundPolicy(quorum=0),
        {},
        (),
        "totals",
        c.compression,
        c.study.aggregation,
        c.study.weighting,
        c.secure_aggregation,
    )
    strategy, state = (
        c.study.strategy,
        c.study.strategy.init_state(sim.trainer_context.spec.read_state(sim.trainer_context.make_model()), c.context),
    )
    return asking.aggregate({site: strategy.train_payload(state, site) for site in c.sites}), asking


@pytest.mark.parametrize("phase", ["advertise", "share", "train", "unmask"])
def test_a_site_may_drop_out_in_any_phase(moons, tmp_path, phase):
    """Before its numbers are in, it is left out of the sum; after, it is in it."""
    _, study = masked(moons, sites={"count": 7})
    sim = build_simulation(study, RunFolder.create(tmp_path / "run", study), None, None, lambda r: None)
    lost = {"site-03"}
    total, asking = ask(sim, {phase: lost})
    left = [s for s in sim.round_loop.sites if s not in lost or phase == "unmask"]
    assert total.sites == left
    assert total.work_by_client == {}
    plain = study.model_copy(update={"privacy": type(study.privacy)()})
    twin = build_simulation(plain, RunFolder.create(tmp_path / "plain", plain), None, None, lambda r: None)
    want, _ = ask(twin, {} if phase == "unmask" else {"train": lost})
    torch.testing.assert_close(total.mean("delta"), want.mean("delta"), rtol=1e-4, atol=1e-6)
    if phase != "unmask":
        assert asking.log.failures == {"site-03": "no answer"}


def test_too_many_dropouts_void_the_round(moons, tmp_path):
    from pipeline.core.errors import QuorumNotReachedError

    _, study = masked(moons, sites={"count": 6})
    sim = build_simulation(study, RunFolder.create(tmp_path / "run", study), None, None, lambda r: None)
    with pytest.raises(QuorumNotReachedError):
        ask(sim, {"train": {"site-01", "site-02"}})


def test_the_same_numbers_are_not_summed_twice(moons, tmp_path):
    """A second attempt of a turn that was unmasked, with other survivors, would give away the difference."""
    from pipeline.core.errors import QuorumNotReachedError

    _, study = masked(moons, sites={"count": 4})
    sim = build_simulation(study, RunFolder.create(tmp_path / "run", study), None, None, lambda r: None)
    ask(sim, {})
    with pytest.raises(QuorumNotReachedError, match="advertised"):
        ask(sim, {"train": {"site-01"}}, attempt=1)
    ask(sim, {}, turn=2)


def test_a_step_belongs_to_the_attempt_that_it_names(moons, tmp_path):
    _, study = masked(moons, sites={"count": 4})
    sim = build_simulation(study, RunFolder.create(tmp_path / "run", study), None, None, lambda r: None)
    desk = sim.engine.secure_agg_clients["site-01"]
    desk.handle_message(Message("advertise", 5, {}))
    with pytest.raises(MessageError, match="takes no part in a secure sum of turn 4"):
        desk._current_secagg_client(Message("unmask", 4, {}))
    restarted = build_simulation(
        study, RunFolder.open(tmp_path / "run"), None, None, lambda r: None
    ).engine.secure_agg_clients["site-01"]
    answer = restarted.handle_message(Message("unmask", 5, {}))
    assert "restarted, and counts as a dropout" in answer.reason  # type: ignore[union-attr]


def test_secure_sums_survive_dropouts_and_deadlines_in_a_run(moons, go):
    _, study = masked(
        moons,
        sites={"count": 6, "speed": [0.5, 4, 4, 4, 4, 4], "dropout": [0, 0.5, 0, 0, 0, 0]},
        round={"deadline": 2.0},
        strategy="fedavg",
    )
    folder, _ = go(study)
    for record in folder.rounds()[1:]:
        assert record["missed"].get("site-01", "").startswith("late") or record["void"]


def test_everything_together(moons, go):
    """Noise at the sites and at the coordinator, and masks around it."""
    folder, results = go(
        moons(
            rounds=3,
            weighting="equal",
            privacy=at_site()
            | {"client_level_dp": {"epsilon": 200.0, "max_update_norm": 1.0}, "secure_aggregation": {}},
        )
    )
    told = json.loads((folder.path / "privacy.json").read_text())
    assert told["client_level_dp"]["epsilon"] <= 200
    assert told["client_level_dp"]["longest"] == pytest.approx(1.0, rel=1e-3)
    assert told["secure_aggregation"]["threshold"] == 3
    assert results["stopped"] == "finished"
    assert charges(folder.path, "site-01")[-1].total_epsilon <= 4.0


# -- who withdraws, and what does not go together


def smear(**sections: Any) -> Study:
    raw: dict[str, Any] = {
        "name": "cells",
        "rounds": 1,
        "data": {"name": "synthetic_smear", "cells": 240, "patients": 24, "size": 32},
        "sites": {"count": 2},
        "model": {"name": "mlp", "hidden": [4]},
        "local": {"lr": 0.1, "batch_size": 40, "epochs": 1},
        "evaluation": {"evaluate_at": "sites"},
        "privacy": {"dp_sgd": {"epsilon": 8.0}},
    }
    return Study.model_validate(raw | sections)


def test_the_unit_is_the_patient_unless_something_else_is_asked_for(tmp_path):
    study = smear()
    sim = build_simulation(study, RunFolder.create(tmp_path / "run", study), None, None, lambda r: None)
    assert sim.privacy_setup is not None
    made = sim.privacy_setup.privacy_plans["site-01"]
    assert made.dp_sgd_params.privacy_unit == "patient"
    assert made.dp_sgd_params.num_units == len(
        sim.dataset.pool.unit_ids[sim.dataset.split_indices["site-01"].train].unique()
    )
    assert made.dp_sgd_params.num_units < made.num_examples


def test_who_withdraws_is_not_read_any_more(tmp_path):
    study, homes = smear(), tmp_path / "homes"
    run_simulation(study, RunFolder.create(tmp_path / "one", study), homes_folder=homes)
    sim = build_simulation(study, RunFolder(tmp_path / "look"), None, None, lambda r: None, homes_folder=homes)
    people = sim.dataset
    unit = int(people.pool.unit_ids[people.split_indices["site-01"].train[0]])
    home = SiteHome.open(homes / "site-01")
    assert home.withdraw_unit(people.unit_names[unit])
    assert not home.withdraw_unit(people.unit_names[unit])
    assert people.unit_names[unit] not in (homes / "site-01" / "ledger.jsonl").read_text()
    after = build_simulation(study, RunFolder(tmp_path / "look"), None, None, lambda r: None, homes_folder=homes)
    held = after.dataset.split_indices["site-01"]
    for rows in (held.train, held.val, held.test):
        assert unit not in people.pool.unit_ids[rows].tolist()
    assert len(held.train) < len(people.split_indices["site-01"].train)
    assert (
        after.privacy_setup.privacy_plans["site-01"].dp_sgd_params.sampling_rate
        == sim.privacy_setup.privacy_plans["site-01"].dp_sgd_params.sampling_rate
    )  # the plan goes on


REFUSED = {
    "BatchNorm mixes": {"model": {"name": "cnn28", "norm": "batch"}},
    "gamma looks at the whole": {"strategy": {"name": "fedprox", "gamma": 0.5}},
    "no privacy mechanism; use fedavg with finetune": {"strategy": "perfedavg"},
    "sends whole gradients": {"strategy": "fedsgd"},
    "decides by losses": {"strategy": "qfedavg"},
    "no site to protect": {"strategy": "centralized", "evaluation": {"evaluate_at": "coordinator"}},
    "would weigh by how many": {"local": {"lr": 0.1, "batch_size": 40, "epochs": 1, "class_balance": "root"}},
    "draws by the site's own classes": {"local": {"lr": 0.1, "batch_size": 40, "epochs": 1, "class_balance": "sample"}},
    "measures all of a site's images": {"normalization": "site"},
    "scores of the very patients": {"evaluation": {"evaluate_at": "sites", "splits": ["val", "train"]}},
    "'slide', but these data have 'patient'": {"privacy": {"dp_sgd": {"epsilon": 8.0, "privacy_unit": "slide"}}},
    "3 values for 2 sites": {"privacy": {"dp_sgd": {"epsilon": [1.0, 2.0, 3.0]}}},
    "more than one site": {"partition": {"name": "dirichlet", "alpha": 5.0}},
    "draws each epoch afresh": {"partition": "iid_resampled"},
    "has to see each": {"strategy": "cfl", "privacy": {"secure_aggregation": {}}},
    "has to see groups": {"strategy": "ifca", "privacy": {"secure_aggregation": {}}},
    "compares single updates": {"aggregation": "median", "privacy": {"secure_aggregation": {}}},
    "no other codec": {"compression": {"uplink": "qsgd"}, "privacy": {"secure_aggregation": {}}},
    "at least 3 a round": {"privacy": {"secure_aggregation": {}}},
    "set weighting = 'equal'": {"privacy": {"client_level_dp": {"noise_multiplier": 1.0}}},
    "also sends control": {"strategy": "scaffold", "privacy": {"client_level_dp": {"noise_multiplier": 1.0}}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_said_when_the_study_is_read(words, tmp_path):
    study = smear(**REFUSED[words])
    with pytest.raises(IncompatibleStudyError, match=words):
        build_simulation(study, RunFolder(tmp_path), None, None, lambda r: None, is_dry_run=True)
    assert not list(tmp_path.iterdir())


def test_data_without_units_ask_for_the_word_example(moons, tmp_path):
    with pytest.raises(IncompatibleStudyError, match="do not say whose each example is"):
        build_simulation(
            moons(privacy={"dp_sgd": {"epsilon": 1.0}}),
            RunFolder(tmp_path),
            None,
            None,
            lambda r: None,
            is_dry_run=True,
        )


def test_noise_at_the_coordinator_is_clipped_and_of_the_right_size(moons, go):
    """Four sites of clip 1 and noise 0.5: the mean's deviation is 0.5 / 4 in every coordinate, every round."""
    from pipeline.aggregation.client_level_dp import ClientLevelDpMean

    folder, _ = go(
        moons(
            rounds=1,
            weighting="equal",
            privacy={"client_level_dp": {"noise_multiplier": 0.5, "max_update_norm": 1.0}},
            local={"lr": 1e-9},
        )
    )
    assert folder.rounds()[1]["attempt"] == 0
    noise = ClientLevelDpMean(max_update_norm=1.0, noise_multiplier=0.5, sensitivity=1.0, num_sampled_clients=4)
    from pipeline.protocol.messages import Aggregate, ClientUpdate, Reply

    replies = [
        Reply(s, "train", 1, 0, ClientUpdate(averaged={"delta": torch.full((20_000,), value)}), 1.0)
        for s, value in (("a", 100.0), ("b", 0.0), ("c", 0.0))
    ]
    mean = noise.aggregate(replies).mean("delta")
    assert float(mean.std()) == pytest.approx(0.5 / 4, rel=0.03)
    assert float(mean.mean()) == pytest.approx(1 / math.sqrt(20_000) / 4, abs=0.003)  # a is cut to length 1
    assert isinstance(noise.finalize_sum(Aggregate.from_sums({"delta": torch.zeros(5)}, 3.0, {}, ["a"])), Aggregate)


def test_yardsticks_of_a_private_study_tell_what_privacy_costs(moons):
    from pipeline.runs.baselines import build_baseline_studies

    study = moons(privacy=at_site())
    found = build_baseline_studies(study, 4)
    assert found.keys() == {"local_only", "centralized", "unprotected"}
    assert all(other.privacy == type(study.privacy)() for other in found.values())
    assert found["unprotected"].strategy == study.strategy


STEPS = {
    "fedprox": 4,
    "scaffold": 4,
    "fednova": 4,
    "fedopt": 4,
    "fedper": 4,
    "finetune": 4,
    "fedpaq": 10,
    "ditto": 8,
    "fedrep": 24,
    "local": 4,
    "cfl": 4,
    "demlearn": 4,
}


@pytest.mark.parametrize("strategy", STEPS)
def test_all_private_steps_of_a_turn_are_charged_whatever_the_strategy(moons, go, strategy):
    """Of those that train twice a turn as well, and of those that train a part of the network."""
    folder, _ = go(moons(rounds=2, strategy=strategy, privacy=at_site()))
    spent = charges(folder.path, "site-02")
    assert [c.steps for c in spent] == [STEPS[strategy]] * 2
    assert 3.9 < spent[-1].total_epsilon <= 4.0


def test_no_step_is_done_that_was_not_paid_for(moons, tmp_path):
    """The same plan on a site that now has more examples, or a strategy that asks for more than it rehearsed."""
    study = moons(rounds=1, privacy=at_site())
    sim = build_simulation(study, RunFolder.create(tmp_path / "run", study), None, None, lambda r: None)
    guard = sim.engine.secure_agg_clients["site-01"].budget_guard
    guard.privacy_plan = replace(guard.privacy_plan, steps=2)  # 32 examples in batches of 8 would be 4
    c = sim.round_loop
    state = study.strategy.start(sim.trainer_context.spec.read_state(sim.trainer_context.make_model()), c.context)
    asking = replace(
        c.create_request(
            "train",
            c.start_run(sim.trainer_context.spec.read_state(sim.trainer_context.make_model())),
            RoundPolicy(partial_updates="keep"),
        ),
        turn=1,
    )
    total = asking.aggregate({"site-01": study.strategy.brief(state, "site-01")})
    assert total.work_by_client["site-01"].steps_done == 2
    assert [charge.steps for charge in guard.home.ledger.list_charges()] == [2]
