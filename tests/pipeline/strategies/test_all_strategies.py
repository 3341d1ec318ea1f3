"""What holds for every strategy: FedAvg with its knobs off, the same work by every trainer, resume to the bit, silence survived."""

import json

import pytest
import torch

from pipeline.coordinator.checkpoint import load_checkpoint
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.registry import registered_components
from pipeline.runs.simulation import run_simulation
from tests.conftest import final_weights

PUBLIC = {"public": {"fraction": 0.2}}
LIVELY = {  # name -> settings under which everything that it can do happens within six rounds of moons
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "fedsgd": {},
    "fedpaq": {"tau": 3},
    "fedopt": {"optimiser": "yogi"},
    "scaffold": {},
    "fednova": {},
    "qfedavg": {"q": 1.0},
    "finetune": {"epochs": 2},
    "perfedavg": {"alpha": 0.1},
    "pfedme": {"rounds": 3, "lam": 2.0, "eta": 0.1},
    "ditto": {},
    "fedper": {},
    "fedrep": {"head_epochs": 2},
    "ifca": {"k": 2},
    "cfl": {"eps1": 1.0, "eps2": 0.0, "gap": -2.0, "smallest": 1},
    "similarity_clustering": {"every": 2},
    "demlearn": {"tau": 2, "pull": "all", "alpha_decay": 0.9},
    "fedswap": {"h2": 3, "swap": "cka", "matching": "optimal"},
    "local_only": {},
    "centralized": {},
}
FIXED = {"fedsgd": {"local": {"lr": 0.5, "batch_size": "all", "epochs": 1}}}
OFF = {  # name -> settings that make it FedAvg
    "fedprox": {"mu": 0.0},
    "fedopt": {"optimiser": "momentum", "beta1": 0.0},
    "scaffold": {"correction": 0.0},
    "qfedavg": {"q": 0.0},
    "finetune": {"epochs": 0},
    "perfedavg": {"alpha": 0.0},
    "ditto": {"lam": 0.3},  # its common model always is
    "fedper": {"keeps": []},
    "fedrep": {"keeps": [], "head_epochs": 0},
    "ifca": {"k": 1},
    "cfl": {"eps1": 0.0},
    "similarity_clustering": {"k": 1},
    "fedswap": {"h2": 1},
}
NEARLY = {  # up to rounding: they divide and multiply again, or sum models instead of moves
    "fednova": {},
    "demlearn": {"levels": 1, "amplify": 1.0, "mu": 0.0},
}
NO_NORM = {"fedbn"}  # needs a model with normalisation; has tests of its own


def test_no_strategy_is_forgotten():
    assert registered_components("strategies").keys() == LIVELY.keys() | NO_NORM


def study_of(moons, name, settings, **sections):
    sections = {"data": {"name": "moons", "points": 200}} | PUBLIC | FIXED.get(name, {}) | sections
    return moons(strategy={"name": name, **settings}, **sections)


def model_of(folder: RunFolder) -> torch.Tensor:
    """The only common model, whatever it is called."""
    if (folder.path / "models" / "global.safetensors").exists():
        return final_weights(folder)
    from pipeline.core.tensor_io import load_tensors

    return load_tensors(folder.path / "models" / "group" / "0.safetensors")[1]["weights"]


@pytest.mark.parametrize("name", OFF)
def test_with_its_knobs_off_it_is_fedavg_to_the_bit(moons, go, name):
    uneven = {"partition": {"name": "quantity", "ratio": 3}, "client_sampling": {"fraction": 0.75}}
    one, _ = go(study_of(moons, name, OFF[name], **uneven), name)
    other, _ = go(study_of(moons, "fedavg", {}, **uneven), "avg")
    assert torch.equal(model_of(one), final_weights(other))


@pytest.mark.parametrize("name", NEARLY)
def test_with_its_knobs_off_it_is_fedavg_up_to_rounding(moons, go, name):
    one, _ = go(study_of(moons, name, NEARLY[name], weighting="equal"), name)
    other, _ = go(study_of(moons, "fedavg", {}, weighting="equal"), "avg")
    torch.testing.assert_close(model_of(one), final_weights(other), rtol=1e-5, atol=1e-6)


def test_pfedme_of_one_round_all_the_way_is_fedprox(moons, go):
    local = {"lr": 0.1, "batch": 8, "steps": 5}
    one, _ = go(study_of(moons, "pfedme", {"rounds": 1, "inner": 5, "lam": 2.0, "eta": 0.5}, local=local), "me")
    other, _ = go(study_of(moons, "fedprox", {"mu": 2.0}, local=local), "prox")
    assert torch.equal(final_weights(one), final_weights(other))


def test_fedpaq_with_its_codec_taken_away_is_fedavg(moons, go):
    one, _ = go(study_of(moons, "fedpaq", {"tau": 5}, compression={"uplink": []}), "paq")
    other, _ = go(study_of(moons, "fedavg", {}, local={"lr": 0.1, "batch_size": 8, "steps": 5}), "avg")
    assert torch.equal(final_weights(one), final_weights(other))


@pytest.mark.parametrize("name", LIVELY)
def test_trainers_agree(moons, go, name):
    ends = []
    for trainer in ("sequential", "stacked"):
        folder, results = go(study_of(moons, name, LIVELY[name], trainer=trainer, rounds=4), f"{name}-{trainer}")
        tensors = load_checkpoint(folder.path / "checkpoint")[1]
        ends.append(({k: v for k, v in tensors.items() if v.is_floating_point()}, results["test"]["pooled"]["loss"]))
    assert ends[0][0].keys() == ends[1][0].keys()
    for key, value in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][key], value, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")
    assert ends[1][1] == pytest.approx(ends[0][1], rel=1e-3)


@pytest.mark.parametrize("name", LIVELY)
def test_stopped_and_resumed_it_is_the_undisturbed_run(moons, go, tmp_path, name):
    study = study_of(moons, name, LIVELY[name], compression={"uplink": [{"name": "topk", "fraction": 0.5}, "qsgd"]})
    resumes_to_the_bit(study, go, tmp_path, stop=3)


def resumes_to_the_bit(study, go, tmp_path, stop):
    whole, want = go(study, "whole")
    folder = RunFolder.create(tmp_path / "cut", study)

    class Killed(Exception):
        pass

    def watch(record):
        if record["round"] == stop:
            raise Killed

    with pytest.raises(Killed):
        run_simulation(study, folder, on_round_end=watch)
    got = run_simulation(RunFolder.open(folder.path).load_study(), RunFolder.open(folder.path))
    assert got["test"] == want["test"]
    last, other = (load_checkpoint(f.path / "checkpoint")[1] for f in (whole, folder))
    assert last.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in last.items())
    for part in ("groups", "tree"):
        assert [r.get(part) for r in whole.rounds()] == [r.get(part) for r in folder.load_rounds()]


@pytest.mark.parametrize("name", sorted(set(LIVELY) - {"centralized"}))
def test_a_site_that_never_answers_is_survived(moons, go, name):
    sites = {"count": 4, "dropout": [0.0, 0.0, 1.0, 0.0]}
    watching = {"where": "sites", "watch": ["test"]}
    folder, results = go(study_of(moons, name, LIVELY[name], sites=sites, evaluation=watching), name)
    start, *rounds = folder.rounds()
    assert all("site-03" not in record["counted"] for record in rounds)
    assert all(record["void"] is None for record in rounds)
    assert rounds[-1]["metrics"]["test"]["pooled"]["loss"] < start["metrics"]["test"]["pooled"]["loss"]
    json.dumps(results)


CELLS = {
    "data": {"name": "synthetic_smear", "cells": 200, "patients": 40, "size": 40, "val": 0.0},
    "sites": {"count": 2},
    "feature_skew": {"name": "scanner"},
    "model": {"name": "cnn72", "norm": "batch"},
    "local": {"lr": 0.01, "batch_size": 15},
    "rounds": 2,
}


def test_fedbn_resumes_to_the_bit(moons, go, tmp_path):
    resumes_to_the_bit(moons(strategy="fedbn", **CELLS), go, tmp_path, stop=1)


def test_fedbn_is_the_same_by_loop_and_pool(moons, go):
    ends = []
    for trainer in ("sequential", "threaded"):
        folder, _ = go(moons(strategy="fedbn", trainer=trainer, **CELLS), trainer)
        tensors = load_checkpoint(folder.path / "checkpoint")[1]
        ends.append({k: v for k, v in tensors.items() if v.is_floating_point()})
    assert any("kept" in key for key in ends[0])
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=1e-2, atol=3e-3)  # BatchNorm of small batches amplifies


def test_fedbn_keeping_nothing_is_fedavg_to_the_bit(moons, go):
    one, _ = go(moons(strategy={"name": "fedbn", "personal_roles": []}, **CELLS), "bn")
    other, _ = go(moons(strategy="fedavg", **CELLS), "avg")
    assert torch.equal(final_weights(one), final_weights(other))
