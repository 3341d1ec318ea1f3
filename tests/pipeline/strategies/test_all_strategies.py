"""What holds for every strategy: equal to FedAvg with neutral settings, equal for every trainer, bitwise resume, robust to silent clients."""

import json

import pytest
import torch

from pipeline.coordinator.checkpoint import load_checkpoint
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.registry import registered_components
from pipeline.runs.simulation import run_simulation
from tests.support.studies import final_weights

PUBLIC = {"public": {"fraction": 0.2}}
ACTIVE_SETTINGS = {  # name -> settings under which every part of it acts within six rounds of moons
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "fedsgd": {},
    "fedpaq": {"tau": 3},
    "fedopt": {"optimizer": "yogi"},
    "scaffold": {},
    "fednova": {},
    "qfedavg": {"q": 1.0},
    "finetune": {"epochs": 2},
    "perfedavg": {"alpha": 0.1},
    "pfedme": {"local_rounds": 3, "lam": 2.0, "eta": 0.1},
    "ditto": {},
    "fedper": {},
    "fedrep": {"head_epochs": 2},
    "ifca": {"k": 2},
    "cfl": {"eps1": 1.0, "eps2": 0.0, "gap": -2.0, "min_cluster_size": 1},
    "similarity_clustering": {"cluster_every": 2},
    "demlearn": {"tau": 2, "proximal_to": "all", "alpha_decay": 0.9},
    "fedswap": {"h2": 3, "swap": "cka", "matching": "optimal"},
    "local_only": {},
    "centralized": {},
}
EXTRA_SECTIONS = {"fedsgd": {"local": {"lr": 0.5, "batch_size": "all", "epochs": 1}}}
FEDAVG_SETTINGS = {  # name -> settings that make it FedAvg
    "fedprox": {"mu": 0.0},
    "fedopt": {"optimizer": "momentum", "beta1": 0.0},
    "scaffold": {"correction": 0.0},
    "qfedavg": {"q": 0.0},
    "finetune": {"epochs": 0},
    "perfedavg": {"alpha": 0.0},
    "ditto": {"lam": 0.3},  # its global model always is
    "fedper": {"personal_roles": []},
    "fedrep": {"personal_roles": [], "head_epochs": 0},
    "ifca": {"k": 1},
    "cfl": {"eps1": 0.0},
    "similarity_clustering": {"k": 1},
    "fedswap": {"h2": 1},
}
NEARLY_FEDAVG_SETTINGS = {  # equal up to rounding: they divide and multiply again, or sum models instead of deltas
    "fednova": {},
    "demlearn": {"levels": 1, "amplify": 1.0, "mu": 0.0},
}
NEVER_FEDAVG = {"fedavg", "fedsgd", "fedpaq", "pfedme", "local_only", "centralized"}  # or it is tested below
NEEDS_NORM_LAYERS = {"fedbn"}  # tested below with another model


def test_every_registered_strategy_is_tested():
    untested = registered_components("strategies").keys() - ACTIVE_SETTINGS.keys() - NEEDS_NORM_LAYERS
    assert not untested, f"add settings of {sorted(untested)} to ACTIVE_SETTINGS (docs/add-a-strategy.md)"
    compared = [*FEDAVG_SETTINGS, *NEARLY_FEDAVG_SETTINGS, *NEVER_FEDAVG]
    assert sorted(compared) == sorted(ACTIVE_SETTINGS), (
        "every strategy is in one of FEDAVG_SETTINGS, NEARLY_FEDAVG_SETTINGS and NEVER_FEDAVG (docs/add-a-strategy.md)"
    )


def make_study(moons, name, settings, **sections):
    sections = {"data": {"name": "moons", "points": 200}} | PUBLIC | EXTRA_SECTIONS.get(name, {}) | sections
    return moons(strategy={"name": name, **settings}, **sections)


def only_model(folder: RunFolder) -> torch.Tensor:
    """The weights of the only model, global or of cluster 0."""
    if (folder.path / "models" / "global.safetensors").exists():
        return final_weights(folder)
    from pipeline.core.tensor_io import load_tensors

    return load_tensors(folder.path / "models" / "cluster" / "0.safetensors")[1]["weights"]


@pytest.mark.parametrize("name", FEDAVG_SETTINGS)
def test_neutral_settings_are_fedavg_to_the_bit(moons, run_study, name):
    uneven = {"partition": {"name": "quantity", "ratio": 3}, "client_sampling": {"fraction": 0.75}}
    one, _ = run_study(make_study(moons, name, FEDAVG_SETTINGS[name], **uneven), name)
    other, _ = run_study(make_study(moons, "fedavg", {}, **uneven), "avg")
    assert torch.equal(only_model(one), final_weights(other))


@pytest.mark.parametrize("name", NEARLY_FEDAVG_SETTINGS)
def test_neutral_settings_are_fedavg_up_to_rounding(moons, run_study, name):
    one, _ = run_study(make_study(moons, name, NEARLY_FEDAVG_SETTINGS[name], weighting="equal"), name)
    other, _ = run_study(make_study(moons, "fedavg", {}, weighting="equal"), "avg")
    torch.testing.assert_close(only_model(one), final_weights(other), rtol=1e-5, atol=1e-6)


def test_pfedme_with_one_local_round_is_fedprox(moons, run_study):
    local = {"lr": 0.1, "batch_size": 8, "steps": 5}
    one, _ = run_study(
        make_study(moons, "pfedme", {"local_rounds": 1, "inner_steps": 5, "lam": 2.0, "eta": 0.5}, local=local), "me"
    )
    other, _ = run_study(make_study(moons, "fedprox", {"mu": 2.0}, local=local), "prox")
    assert torch.equal(final_weights(one), final_weights(other))


def test_fedpaq_without_its_codec_is_fedavg(moons, run_study):
    one, _ = run_study(make_study(moons, "fedpaq", {"tau": 5}, compression={"uplink": []}), "paq")
    other, _ = run_study(make_study(moons, "fedavg", {}, local={"lr": 0.1, "batch_size": 8, "steps": 5}), "avg")
    assert torch.equal(final_weights(one), final_weights(other))


@pytest.mark.parametrize("name", ACTIVE_SETTINGS)
def test_trainers_agree(moons, run_study, name):
    ends = []
    for trainer in ("sequential", "stacked"):
        folder, results = run_study(
            make_study(moons, name, ACTIVE_SETTINGS[name], trainer=trainer, rounds=4), f"{name}-{trainer}"
        )
        tensors = load_checkpoint(folder.path / "checkpoint")[1]
        ends.append(({k: v for k, v in tensors.items() if v.is_floating_point()}, results.test.pooled.loss))
    assert ends[0][0].keys() == ends[1][0].keys()
    for key, value in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][key], value, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")
    assert ends[1][1] == pytest.approx(ends[0][1], rel=1e-3)


@pytest.mark.parametrize("name", ACTIVE_SETTINGS)
def test_resumed_run_equals_the_uninterrupted_run_to_the_bit(moons, run_study, tmp_path, name):
    study = make_study(
        moons, name, ACTIVE_SETTINGS[name], compression={"uplink": [{"name": "topk", "fraction": 0.5}, "qsgd"]}
    )
    assert_bitwise_resume(study, run_study, tmp_path, stop=3)


def assert_bitwise_resume(study, run_study, tmp_path, stop):
    uninterrupted, expected = run_study(study, "uninterrupted")
    folder = RunFolder.create(tmp_path / "interrupted", study)

    class InterruptedRunError(Exception):
        pass

    def interrupt(record):
        if record.round == stop:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        run_simulation(study, folder, on_round_end=interrupt)
    results = run_simulation(RunFolder.open(folder.path).load_study(), RunFolder.open(folder.path))
    assert results.test == expected.test
    last, other = (load_checkpoint(f.path / "checkpoint")[1] for f in (uninterrupted, folder))
    assert last.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in last.items())
    for part in ("clusters", "dendrogram"):
        assert [getattr(r, part) for r in uninterrupted.load_rounds()] == [
            getattr(r, part) for r in folder.load_rounds()
        ]


@pytest.mark.parametrize("name", sorted(set(ACTIVE_SETTINGS) - {"centralized"}))
def test_client_that_never_replies_does_not_stop_the_run(moons, run_study, name):
    sites = {"count": 4, "dropout": [0.0, 0.0, 1.0, 0.0]}
    evaluation = {"evaluate_at": "sites", "splits": ["test"]}
    folder, results = run_study(
        make_study(moons, name, ACTIVE_SETTINGS[name], sites=sites, evaluation=evaluation), name
    )
    start, *rounds = folder.load_rounds()
    assert all("site-03" not in record.accepted for record in rounds)
    assert all(record.void is None for record in rounds)
    assert rounds[-1].metrics["test"].pooled.loss < start.metrics["test"].pooled.loss
    json.dumps(results.to_dict(), allow_nan=False)


CELLS = {
    "data": {"name": "synthetic_smear", "cells": 200, "patients": 40, "size": 40, "val": 0.0},
    "sites": {"count": 2},
    "feature_skew": {"name": "scanner"},
    "model": {"name": "cnn72", "norm": "batch"},
    "local": {"lr": 0.01, "batch_size": 15},
    "rounds": 2,
}


def test_fedbn_resumes_to_the_bit(moons, run_study, tmp_path):
    assert_bitwise_resume(moons(strategy="fedbn", **CELLS), run_study, tmp_path, stop=1)


def test_fedbn_sequential_and_threaded_trainers_agree(moons, run_study):
    ends = []
    for trainer in ("sequential", "threaded"):
        folder, _ = run_study(moons(strategy="fedbn", trainer=trainer, **CELLS), trainer)
        tensors = load_checkpoint(folder.path / "checkpoint")[1]
        ends.append({k: v for k, v in tensors.items() if v.is_floating_point()})
    assert any("kept" in key for key in ends[0])
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-2, atol=3e-3)  # BatchNorm of small batches amplifies


def test_fedbn_without_personal_roles_is_fedavg_to_the_bit(moons, run_study):
    one, _ = run_study(moons(strategy={"name": "fedbn", "personal_roles": []}, **CELLS), "bn")
    other, _ = run_study(moons(strategy="fedavg", **CELLS), "avg")
    assert torch.equal(final_weights(one), final_weights(other))
