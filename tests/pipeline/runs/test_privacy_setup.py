"""Privacy units and withdrawn units of a simulation."""

from __future__ import annotations

from pipeline.coordinator.run_folder import RunFolder
from pipeline.records.privacy_record import ClientLevelDpRecord, PrivacyRecord
from pipeline.runs.privacy_setup import create_client_level_dp
from pipeline.runs.simulation import run_simulation
from sites.governance.home import SiteHome
from tests.support.studies import make_dp_smear_study, make_simulation


def test_client_level_dp_adds_noise_for_the_longest_update_after_rounding():
    record = ClientLevelDpRecord(
        noise_multiplier=1.5,
        max_update_norm=2.0,
        sensitivity=2.25,
        delta=1e-5,
        epsilon=3.5,
        accountant="prv",
        rounds=20,
        sites=12,
        num_sampled_clients=6,
    )
    rule = create_client_level_dp(PrivacyRecord(client_level_dp=record))
    assert (rule.max_update_norm, rule.noise_multiplier, rule.sensitivity, rule.num_sampled_clients) == (
        2.0,
        1.5,
        2.25,
        6,
    )
    assert create_client_level_dp(PrivacyRecord()) is None


def test_privacy_unit_is_the_patient_by_default(tmp_path):
    study = make_dp_smear_study()
    simulation = make_simulation(study, RunFolder.create(tmp_path / "run", study))
    assert simulation.privacy_setup is not None
    plan = simulation.privacy_setup.privacy_plans["site-01"]
    assert plan.dp_sgd_params.privacy_unit == "patient"
    assert plan.dp_sgd_params.num_units == len(
        simulation.dataset.pool.unit_ids[simulation.dataset.split_indices["site-01"].train].unique()
    )
    assert plan.dp_sgd_params.num_units < plan.num_examples


def test_withdrawn_unit_is_not_read_any_more(tmp_path):
    study, homes = make_dp_smear_study(), tmp_path / "homes"
    run_simulation(study, RunFolder.create(tmp_path / "one", study), homes_folder=homes)
    before = make_simulation(study, RunFolder(tmp_path / "before"), homes_folder=homes)
    dataset = before.dataset
    unit = int(dataset.pool.unit_ids[dataset.split_indices["site-01"].train[0]])
    home = SiteHome.open(homes / "site-01")
    assert home.withdraw_unit(dataset.unit_names[unit])
    assert not home.withdraw_unit(dataset.unit_names[unit])
    assert dataset.unit_names[unit] not in (homes / "site-01" / "ledger.jsonl").read_text()
    after = make_simulation(study, RunFolder(tmp_path / "before"), homes_folder=homes)
    indices = after.dataset.split_indices["site-01"]
    for rows in (indices.train, indices.val, indices.test):
        assert unit not in dataset.pool.unit_ids[rows].tolist()
    assert len(indices.train) < len(dataset.split_indices["site-01"].train)
    assert (
        after.privacy_setup.privacy_plans["site-01"].dp_sgd_params.sampling_rate
        == before.privacy_setup.privacy_plans["site-01"].dp_sgd_params.sampling_rate
    )  # the committed plan does not change
