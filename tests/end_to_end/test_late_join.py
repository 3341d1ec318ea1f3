"""A site that joins a finished run gets a model of its own, changes nothing of the run, and is refused where that makes no sense."""

import json

import pytest
import torch

from pipeline.coordinator.checkpoint import load_tensors
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadData, BadRun, BadStudy
from pipeline.runs.late_join import Newcomer, join

TURNED = {"name": "plane", "sites": 2, "theta": 2.5}


def newcomer(turns=5, data=None, **sets):
    return Newcomer("north", data, {"seed": 7} | sets, turns)


def files(folder: RunFolder) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.path.rglob("*") if p.is_file() and "joined" not in p.parts}


@pytest.mark.parametrize("name", ["ditto", "fedper", "fedrep", "pfedme", "finetune", "perfedavg", "demlearn"])
def test_it_has_its_own_model_and_the_run_stays_as_it_was(moons, go, name):
    folder, _ = go(moons(strategy=name))
    before = files(folder)
    got = join(folder, newcomer())
    assert files(folder) == before
    header, kept = load_tensors(folder.path / "joined" / "north" / "models" / "own.safetensors")
    assert header["classes"] == folder.read_json("sites.json")["classes"]
    assert got["own"]["n"] == got["global"]["n"] == got["alone"]["n"] > 0
    common = load_tensors(folder.path / "models" / "global.safetensors")[1]["weights"]
    assert not torch.equal(kept["weights"], common)
    json.dumps(got)


def test_more_turns_fit_a_memory_better(moons, go):
    folder, _ = go(moons(strategy="fedper"))
    losses = []
    for turns in (1, 20):
        got = join(folder, Newcomer(f"turns-{turns}", None, {"seed": 7}, turns))
        losses.append(got["own"]["loss"])
    assert losses[1] < losses[0]


@pytest.mark.parametrize("strategy", [
    {"name": "ifca", "warmup": 4}, {"name": "similarity", "every": 2}, {"name": "cfl", "eps1": 1.0, "gap": 0.0},
    {"name": "demlearn", "levels": 2, "amplify": 1.0, "alpha": 0.0},
])  # fmt: skip
def test_it_joins_the_group_that_sees_as_it_does(moons, go, strategy):
    points = {"name": "moons", "points": 1000}
    folder, _ = go(moons(strategy=strategy, skew=TURNED, data=points, rounds=12, local={"lr": 0.3, "batch": 8}))
    groups = folder.rounds()[-1]["groups"]
    assert groups["site-01"] == groups["site-02"] != groups["site-03"] == groups["site-04"]
    assert join(folder, newcomer())["group"] == groups["site-03"]
    turned = Newcomer("south", None, {"seed": 7, "skew": TURNED | {"sites": 1}}, 1)
    assert join(folder, turned)["group"] == groups["site-01"]


@pytest.mark.parametrize("name", ["fedavg", "fedopt", "scaffold", "fedswap"])
def test_a_common_model_can_be_fine_tuned_for_it(moons, go, name):
    folder, _ = go(moons(strategy=name))
    with pytest.raises(BadStudy, match="--set strategy=finetune"):
        join(folder, newcomer())
    assert not (folder.path / "joined" / "north").exists()
    got = join(folder, newcomer(strategy="finetune"))
    assert got["own"]["loss"] < got["global"]["loss"]


def test_what_cannot_be_is_said(moons, go, tmp_path):
    folder, _ = go(moons(strategy="ditto"))
    with pytest.raises(BadData, match="the run's own examples"):
        join(folder, Newcomer("north", None, {}, 1))
    with pytest.raises(BadStudy, match="keeps other things"):
        join(folder, newcomer(strategy="ifca"))
    join(folder, newcomer())
    with pytest.raises(BadRun, match="another --name"):
        join(folder, newcomer())
    fresh = RunFolder.create(tmp_path / "fresh", moons())
    with pytest.raises(BadRun, match="not finished"):
        join(fresh, newcomer())


def test_a_robust_rule_of_the_run_does_not_keep_it_out(moons, go):
    folder, _ = go(moons(strategy="ditto", combine={"name": "krum", "bad": 0}, codec={"up": "qsgd", "down": "fp16"}))
    assert join(folder, newcomer())["own"]["n"] > 0
