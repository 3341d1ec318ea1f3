"""A site that joins a finished run gets a model of its own, changes nothing of the run, and is refused where that makes no sense."""

import json

import pytest
import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import DataError, RunFolderError, StudyError
from pipeline.core.tensor_io import load_tensors
from pipeline.runs.late_join import LateJoiner, join_run

TURNED = {"name": "plane", "sites": 2, "theta": 2.5}


def newcomer(turns=5, data=None, **sets):
    return LateJoiner("north", data, {"seed": 7} | sets, turns)


def files(folder: RunFolder) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.path.rglob("*") if p.is_file() and "joined" not in p.parts}


@pytest.mark.parametrize("name", ["ditto", "fedper", "fedrep", "pfedme", "finetune", "perfedavg", "demlearn"])
def test_it_has_its_own_model_and_the_run_stays_as_it_was(moons, go, name):
    folder, _ = go(moons(strategy=name))
    before = files(folder)
    got = join_run(folder, newcomer())
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
        got = join_run(folder, LateJoiner(f"turns-{turns}", None, {"seed": 7}, turns))
        losses.append(got["own"]["loss"])
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "ifca", "warmup": 4},
        {"name": "similarity_clustering", "every": 2},
        {"name": "cfl", "eps1": 1.0, "gap": 0.0},
        {"name": "demlearn", "levels": 2, "amplify": 1.0, "alpha": 0.0},
    ],
)
def test_it_joins_the_group_that_sees_as_it_does(moons, go, strategy):
    points = {"name": "moons", "points": 1000}
    folder, _ = go(
        moons(strategy=strategy, feature_skew=TURNED, data=points, rounds=12, local={"lr": 0.3, "batch_size": 8})
    )
    groups = folder.rounds()[-1]["groups"]
    assert groups["site-01"] == groups["site-02"] != groups["site-03"] == groups["site-04"]
    assert join_run(folder, newcomer())["group"] == groups["site-03"]
    turned = LateJoiner("south", None, {"seed": 7, "feature_skew": TURNED | {"sites": 1}}, 1)
    assert join_run(folder, turned)["group"] == groups["site-01"]


@pytest.mark.parametrize("name", ["fedavg", "fedopt", "scaffold", "fedswap"])
def test_a_common_model_can_be_fine_tuned_for_it(moons, go, name):
    folder, _ = go(moons(strategy=name))
    with pytest.raises(StudyError, match="--set strategy=finetune"):
        join_run(folder, newcomer())
    assert not (folder.path / "joined" / "north").exists()
    got = join_run(folder, newcomer(strategy="finetune"))
    assert got["own"]["loss"] < got["global"]["loss"]


def test_what_cannot_be_is_said(moons, go, tmp_path):
    folder, _ = go(moons(strategy="ditto"))
    with pytest.raises(DataError, match="the run's own examples"):
        join_run(folder, LateJoiner("north", None, {}, 1))
    with pytest.raises(StudyError, match="keeps other things"):
        join_run(folder, newcomer(strategy="ifca"))
    join_run(folder, newcomer())
    with pytest.raises(RunFolderError, match="another --name"):
        join_run(folder, newcomer())
    fresh = RunFolder.create(tmp_path / "fresh", moons())
    with pytest.raises(RunFolderError, match="not finished"):
        join_run(fresh, newcomer())


def test_a_robust_rule_of_the_run_does_not_keep_it_out(moons, go):
    folder, _ = go(
        moons(
            strategy="ditto",
            aggregation={"name": "krum", "num_byzantine": 0},
            compression={"uplink": "qsgd", "downlink": "fp16"},
        )
    )
    assert join_run(folder, newcomer())["own"]["n"] > 0
