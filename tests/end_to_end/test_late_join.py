"""A site that joins a finished run gets a personal model and does not change the run."""

import json

import pytest
import torch

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import DataError, RunFolderError, StudyError
from pipeline.core.tensor_io import load_tensors
from pipeline.records.sites_record import SitesRecord
from pipeline.runs.late_join import LateJoiner, join_run

ROTATED = {"name": "plane", "sites": 2, "theta": 2.5}


def make_late_joiner(num_rounds=5, data_path=None, **overrides):
    return LateJoiner("north", data_path, {"seed": 7} | overrides, num_rounds)


def read_files(folder: RunFolder) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.path.rglob("*") if p.is_file() and "joined" not in p.parts}


@pytest.mark.parametrize("name", ["ditto", "fedper", "fedrep", "pfedme", "finetune", "perfedavg", "demlearn"])
def test_late_joiner_gets_a_personal_model_and_the_run_stays_unchanged(moons, run_study, name):
    folder, _ = run_study(moons(strategy=name))
    before = read_files(folder)
    results = join_run(folder, make_late_joiner())
    assert read_files(folder) == before
    header, tensors = load_tensors(folder.path / "joined" / "north" / "models" / "own.safetensors")
    assert tuple(header["classes"]) == SitesRecord.read(folder.path).classes
    assert results.personalized_model.n == results.global_model.n == results.local_only.n > 0
    global_weights = load_tensors(folder.path / "models" / "global.safetensors")[1]["weights"]
    assert not torch.equal(tensors["weights"], global_weights)
    json.dumps(results.to_dict(), allow_nan=False)


def test_late_joiner_loss_falls_with_more_rounds(moons, run_study):
    folder, _ = run_study(moons(strategy="fedper"))
    losses = []
    for num_rounds in (1, 20):
        results = join_run(folder, LateJoiner(f"rounds-{num_rounds}", None, {"seed": 7}, num_rounds))
        losses.append(results.personalized_model.loss)
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "ifca", "warmup_rounds": 4},
        {"name": "similarity_clustering", "cluster_every": 2},
        {"name": "cfl", "eps1": 1.0, "gap": 0.0},
        {"name": "demlearn", "levels": 2, "amplify_rounds": 1.0, "alpha": 0.0},
    ],
)
def test_late_joiner_is_assigned_to_the_cluster_with_its_feature_skew(moons, run_study, strategy):
    points = {"name": "moons", "points": 1000}
    folder, _ = run_study(
        moons(strategy=strategy, feature_skew=ROTATED, data=points, rounds=12, local={"lr": 0.3, "batch_size": 8})
    )
    groups = folder.load_rounds()[-1].clusters
    assert groups["site-01"] == groups["site-02"] != groups["site-03"] == groups["site-04"]
    assert join_run(folder, make_late_joiner()).cluster == groups["site-03"]
    rotated = LateJoiner("south", None, {"seed": 7, "feature_skew": ROTATED | {"sites": 1}}, 1)
    assert join_run(folder, rotated).cluster == groups["site-01"]


@pytest.mark.parametrize("name", ["fedavg", "fedopt", "scaffold", "fedswap"])
def test_late_joiner_can_fine_tune_a_global_model(moons, run_study, name):
    folder, _ = run_study(moons(strategy=name))
    with pytest.raises(StudyError, match="--set strategy=finetune"):
        join_run(folder, make_late_joiner())
    assert not (folder.path / "joined" / "north").exists()
    results = join_run(folder, make_late_joiner(strategy="finetune"))
    assert results.personalized_model.loss < results.global_model.loss


def test_impossible_late_joins_are_refused(moons, run_study, tmp_path):
    folder, _ = run_study(moons(strategy="ditto"))
    with pytest.raises(DataError, match="the run's own examples"):
        join_run(folder, LateJoiner("north", None, {}, 1))
    with pytest.raises(StudyError, match="their states differ"):
        join_run(folder, make_late_joiner(strategy="ifca"))
    join_run(folder, make_late_joiner())
    with pytest.raises(RunFolderError, match="another --name"):
        join_run(folder, make_late_joiner())
    unfinished = RunFolder.create(tmp_path / "unfinished", moons())
    with pytest.raises(RunFolderError, match="not finished"):
        join_run(unfinished, make_late_joiner())


def test_late_join_of_a_run_with_a_robust_rule_and_codecs(moons, run_study):
    folder, _ = run_study(
        moons(
            strategy="ditto",
            aggregation={"name": "krum", "num_byzantine": 0},
            compression={"uplink": "qsgd", "downlink": "fp16"},
        )
    )
    assert join_run(folder, make_late_joiner()).personalized_model.n > 0
