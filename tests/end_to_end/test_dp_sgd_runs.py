"""Runs with DP-SGD at the sites: the budget holds to the last step, over restarts and over studies."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

from pipeline.coordinator.round_loop import RoundLoop, RunState
from pipeline.coordinator.run_folder import RunFolder
from pipeline.protocol.messages import RoundPolicy
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, compute_epsilon
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.ledger import Ledger
from privacy.ledger.verify import verify_ledger
from tests.support.studies import make_dp_sgd_section, make_simulation, read_charges


def test_dp_sgd_spends_its_budget_to_the_last_step_as_dp_accounting_confirms(moons, run_study):
    folder, results = run_study(moons(privacy=make_dp_sgd_section()))
    assert results.stop_reason == "finished"
    for site in ("site-01", "site-04"):
        charges = read_charges(folder.path, site)
        assert [c.round for c in charges] == [1, 2, 3, 4, 5, 6]
        assert [c.steps for c in charges] == [4] * 6  # ceil(32 / 8), where int(1 / rate) would do too
        assert 3.95 < charges[-1].total_epsilon <= 4.0
        assert all(a.total_epsilon < b.total_epsilon for a, b in itertools.pairwise(charges))
        rdp_accountant = RdpAccountant()
        for c in charges:
            step = dp_accounting.PoissonSampledDpEvent(
                c.sampling_rate, dp_accounting.GaussianDpEvent(c.noise_multiplier)
            )
            rdp_accountant.compose(step, c.steps)
        assert charges[-1].total_epsilon <= rdp_accountant.get_epsilon(1e-5) <= 1.25 * charges[-1].total_epsilon
        receipt = LedgerCountersigner(folder.path / "coordinator/receipts", keys.generate_key()).last_receipt(
            site, f"{site}:moons"
        )
        verification = verify_ledger(folder.path / "homes" / site / "ledger.jsonl", receipt)
        assert verification.is_valid
        assert receipt is not None
    assert folder.load_rounds()[-1].epsilon["site-01"] == read_charges(folder.path, "site-01")[-1].total_epsilon


def test_dp_sgd_charges_the_last_short_batch(moons, run_study):
    """32 examples in batches of 9 are 4 steps; int(1 / (9 / 32)) would be 3."""
    folder, _ = run_study(
        moons(rounds=2, local={"lr": 0.1, "batch_size": 9, "epochs": 2}, privacy=make_dp_sgd_section())
    )
    charges = read_charges(folder.path, "site-01")
    assert [c.steps for c in charges] == [8, 8]
    assert charges[0].sampling_rate == 9 / 32


def test_exhausted_epsilon_budget_ends_the_run_early_and_keeps_the_best_model(moons, run_study):
    folder, results = run_study(moons(rounds=20, privacy=make_dp_sgd_section(epsilon_budget=2.0)))
    assert results.stop_reason == "early: every site's privacy budget is spent"
    assert 1 <= results.best_round < results.rounds < 20
    last = folder.load_rounds()[-1]
    assert set(last.failures) == {"site-01", "site-02", "site-03", "site-04"}
    assert {failure.kind for failure in last.failures.values()} == {"privacy_budget"}
    assert all(failure.text.startswith("would spend epsilon") for failure in last.failures.values())
    for site in last.failures:
        charges = read_charges(folder.path, site)
        assert charges[-1].total_epsilon <= 2.0
        assert compute_epsilon(
            [DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in charges], 1e-5
        ) == pytest.approx(charges[-1].total_epsilon)
        first = charges[0]
        one_round_more = DpEvent(
            first.noise_multiplier, first.sampling_rate, sum(c.steps for c in charges) + first.steps
        )
        assert compute_epsilon([one_round_more], 1e-5) > 2.0
        kinds = [e.kind for e in Ledger.open(folder.path / "homes" / site / "ledger.jsonl").entries()]
        assert kinds[-1] == "charge_refused"
    assert (folder.path / "models" / "global.safetensors").is_file()


def test_max_participations_end_a_sites_part_in_the_run(moons, run_study):
    folder, results = run_study(moons(privacy=make_dp_sgd_section(max_participations=2)))
    assert [len(r.accepted) for r in folder.load_rounds()[1:]] == [4, 4, 0]
    assert "used all its 2 " in folder.load_rounds()[-1].failures["site-01"].text
    assert results.rounds == 3
    assert 3.9 < read_charges(folder.path, "site-01")[-1].total_epsilon <= 4.0  # less noise: solved for two rounds


def test_epsilon_may_differ_between_sites(moons, run_study):
    folder, _ = run_study(moons(rounds=2, privacy=make_dp_sgd_section(epsilon=[1.0, 2.0, 4.0, 8.0])))
    plans = json.loads((folder.path / "privacy.json").read_text())["dp_sgd"]
    noise_multipliers = [plans[f"site-0{n}"]["noise_multiplier"] for n in (1, 2, 3, 4)]
    assert noise_multipliers == sorted(noise_multipliers, reverse=True)
    assert [round(read_charges(folder.path, f"site-0{n}")[-1].total_epsilon) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]


def test_epsilon_follows_from_a_given_noise_multiplier(moons, run_study):
    folder, _ = run_study(moons(rounds=2, privacy={"dp_sgd": {"privacy_unit": "example", "noise_multiplier": 2.0}}))
    plan = json.loads((folder.path / "privacy.json").read_text())["dp_sgd"]["site-01"]
    assert plan["noise_multiplier"] == 2.0
    assert plan["epsilon"] == pytest.approx(compute_epsilon([DpEvent(2.0, 0.25, 8)], 1e-5))


def test_dp_sgd_sites_send_no_training_loss(moons, run_study):
    folder, _ = run_study(moons(rounds=2, privacy=make_dp_sgd_section()))
    assert all(record.train_loss == {} for record in folder.load_rounds())


class KilledError(Exception):
    pass


def run_until_killed(study: Study, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, round_number: int) -> None:
    """Stops when all sites have trained in this round and the coordinator has not yet written a record."""
    finish_round = RoundLoop._finish_round

    def kill(self: RoundLoop, run_state: RunState, *rest: Any) -> Any:
        if run_state.round == round_number:
            raise KilledError
        return finish_round(self, run_state, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RoundLoop, "_finish_round", kill)
        with pytest.raises(KilledError):
            run_simulation(study, folder)


def test_repeated_round_resends_the_stored_update_without_a_second_charge(moons, tmp_path, monkeypatch):
    study = moons(privacy=make_dp_sgd_section())
    folder = RunFolder.create(tmp_path / "run", study)
    run_until_killed(study, folder, monkeypatch, round_number=3)
    assert [c.round for c in read_charges(folder.path, "site-01")] == [1, 2, 3]
    results = run_simulation(study, folder)
    assert results.rounds == 6
    assert [(c.round, c.attempt) for c in read_charges(folder.path, "site-01")] == [(n, 0) for n in range(1, 7)]


def test_repeated_round_without_a_stored_update_is_charged_again(moons, tmp_path, monkeypatch):
    study = moons(privacy=make_dp_sgd_section())
    folder = RunFolder.create(tmp_path / "run", study)
    run_until_killed(study, folder, monkeypatch, round_number=3)
    shutil.rmtree(folder.path / "homes" / "site-01" / "outbox")
    run_simulation(study, folder)
    charges = read_charges(folder.path, "site-01")
    assert [(c.round, c.attempt) for c in charges] == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (5, 0)]
    assert charges[-1].total_epsilon <= 4.0
    assert "used all its 6 " in folder.load_rounds()[6].failures["site-01"].text
    assert "site-02" in folder.load_rounds()[6].accepted


def test_restoring_an_old_ledger_refunds_no_epsilon(moons, tmp_path, monkeypatch):
    study = moons(privacy=make_dp_sgd_section())
    folder = RunFolder.create(tmp_path / "run", study)
    home = folder.path / "homes" / "site-01"
    run_until_killed(study, folder, monkeypatch, round_number=2)
    old_ledger = (home / "ledger.jsonl").read_bytes()
    run_until_killed(study, RunFolder.open(folder.path), monkeypatch, round_number=4)
    (home / "ledger.jsonl").write_bytes(old_ledger)
    shutil.rmtree(home / "outbox")
    run_simulation(study, RunFolder.open(folder.path))
    assert "site-01" not in folder.load_rounds()[4].accepted
    assert folder.load_rounds()[4].failures["site-01"].kind == "no_receipt"


def test_epsilon_budget_holds_across_studies(moons, tmp_path):
    """Each study alone would fit; the second is admitted by the filter, and stopped where the sum would exceed the budget."""
    homes = tmp_path / "homes"
    privacy = make_dp_sgd_section(epsilon=None, noise_multiplier=3.0, epsilon_budget=3.0)
    first, second = (moons(rounds=8, seed=seed, privacy=privacy) for seed in (3, 4))
    assert first.hash != second.hash
    one = run_simulation(first, RunFolder.create(tmp_path / "one", first), homes_folder=homes)
    two = run_simulation(second, RunFolder.create(tmp_path / "two", second), homes_folder=homes)
    assert one.stop_reason == "finished"
    assert two.stop_reason.startswith("early")
    ledger = Ledger.open(homes / "site-01" / "ledger.jsonl")
    charges = ledger.list_charges()
    assert {c.study_hash for c in charges} == {first.hash, second.hash}
    assert charges[-1].accountant == "rdp filter"
    assert all(a.total_epsilon <= b.total_epsilon for a, b in itertools.pairwise(charges))
    assert (
        compute_epsilon([DpEvent(c.noise_multiplier, c.sampling_rate, c.steps) for c in charges], 1e-5)
        <= charges[-1].total_epsilon
        <= 3.0
    )


STEPS_PER_ROUND = {
    "fedprox": 4,
    "scaffold": 4,
    "fednova": 4,
    "fedopt": 4,
    "fedper": 4,
    "finetune": 4,
    "fedpaq": 10,
    "ditto": 8,
    "fedrep": 24,
    "local_only": 4,
    "cfl": 4,
    "demlearn": 4,
}


@pytest.mark.parametrize("strategy", STEPS_PER_ROUND)
def test_dp_sgd_charges_all_private_steps_of_every_strategy(moons, run_study, strategy):
    """Also of strategies that train twice a round, or train a part of the network."""
    folder, _ = run_study(moons(rounds=2, strategy=strategy, privacy=make_dp_sgd_section()))
    charges = read_charges(folder.path, "site-02")
    assert [c.steps for c in charges] == [STEPS_PER_ROUND[strategy]] * 2
    assert 3.9 < charges[-1].total_epsilon <= 4.0


def test_dp_sgd_never_takes_more_steps_than_its_plan(moons, tmp_path):
    """The same plan on a site that now has more examples, or a strategy that requests more than in its dry run."""
    study = moons(rounds=1, privacy=make_dp_sgd_section())
    simulation = make_simulation(study, RunFolder.create(tmp_path / "run", study))
    guard = simulation.engine.privacy_by_site["site-01"].budget_guard
    # 32 examples in batches of 8 would be 4 steps
    guard.privacy_plan = replace(guard.privacy_plan, steps_per_round=2)
    round_loop = simulation.round_loop
    initial_state = simulation.trainer_context.spec.read_state(simulation.trainer_context.make_model())
    state = study.strategy.init_state(initial_state, round_loop.context)
    run_state = replace(round_loop.start_run(initial_state), round=1)
    request = round_loop.create_request("train", run_state, RoundPolicy(partial_updates="keep"))
    aggregate = request.aggregate({"site-01": study.strategy.train_payload(state, "site-01")})
    assert aggregate.work_by_client["site-01"].steps_done == 2
    assert [charge.steps for charge in guard.home.ledger.list_charges()] == [2]
