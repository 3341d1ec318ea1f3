"""Whole studies through the front door: best round, patience, targets, yardsticks, public data, evaluation."""

import json
from contextlib import nullcontext

import pytest
import torch
from PIL import Image

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import HemofedError, IncompatibleStudyError, RunFolderError, StudyError
from pipeline.runs.baselines import build_baseline_studies, run_baselines
from pipeline.runs.simulation import dry_run_study, run_simulation
from tests.conftest import needs_fashion


def test_the_best_round_by_val_is_what_is_tested_and_saved(moons, go):
    folder, results = go(moons(rounds=12))
    by_round = {r["round"]: r["metrics"]["val"]["pooled"]["accuracy"] for r in folder.rounds() if r["round"]}
    best = max(by_round.values())
    assert results["best_round"] == min(t for t, v in by_round.items() if v == best)
    assert results["chosen_by"] == "val accuracy"
    assert "test" not in folder.rounds()[-1]["metrics"]
    assert results["test"]["pooled"]["n"] == 40


def test_patience_stops_early(moons, go):
    _, results = go(moons(rounds=500, evaluation={"evaluate_at": "sites", "patience": 3}))
    assert results["stopped"].startswith("early")
    assert results["rounds"] == results["best_round"] + 3


def test_a_target_stops_when_reached(moons, go):
    folder, results = go(moons(rounds=200, evaluation={"evaluate_at": "sites", "splits": ["test"], "target": 0.8}))
    assert results["stopped"].startswith("target: accuracy")
    values = [r["metrics"]["test"]["pooled"]["accuracy"] for r in folder.rounds()]
    assert values[-1] >= 0.8
    assert max(values[:-1]) < 0.8


def test_where_decides_who_judges(moons, go):
    for where, want in (
        ("coordinator", {"coordinator"}),
        ("sites", {"pooled", "sites"}),
        ("both", {"coordinator", "pooled", "sites"}),
    ):
        folder, results = go(moons(rounds=1, evaluation={"evaluate_at": where}), where)
        assert set(folder.rounds()[-1]["metrics"]["val"]) == want
        assert set(results["test"]) == want


def test_sites_together_hold_what_the_coordinator_holds(moons, go):
    """Without skew the pooled figures and the coordinator's are of the same examples."""
    _, results = go(moons(rounds=2, evaluation={"evaluate_at": "both"}))
    for metric in ("n", "accuracy", "auroc"):
        assert results["test"]["pooled"][metric] == results["test"]["coordinator"][metric]
    assert results["test"]["pooled"]["loss"] == pytest.approx(results["test"]["coordinator"]["loss"])


def test_skew_moves_the_sites_it_names(moons):
    people = dry_run_study(moons(feature_skew={"name": "plane", "sites": 2, "dx": 10.0}), None).dataset
    mean = [float(people.pool.x[people.split_indices[s].train][:, 0].mean()) for s in people.sites]
    assert mean[0] > 8
    assert mean[1] > 8
    assert mean[2] < 3
    assert mean[3] < 3


def test_rotation_by_a_right_angle():
    from sites.population.feature_skew import PlaneSkew

    turned = PlaneSkew(sites=1, theta=torch.pi / 2).apply(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0, 0)
    torch.testing.assert_close(turned, torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), atol=1e-6, rtol=0)


def quietly(study):
    return nullcontext(lambda record: None)


def test_yardsticks_are_measured_once(moons, go):
    study = moons(rounds=8)
    folder, _ = go(study)
    first = run_baselines(study, folder, None, quietly)
    assert set(first) == {"local_only", "centralized"}
    assert len(first["centralized"]["curve"]) == 9
    assert set(first["local_only"]["test"]["sites"]) == {"site-01", "site-02", "site-03", "site-04"}
    assert run_baselines(study, folder, None, quietly) == first


def test_yardsticks_are_followed_by_the_class_that_matters(moons, go):
    study = moons(rounds=2, evaluation={"evaluate_at": "sites", "positive_class": "lower"})
    folder, _ = go(study)
    found = run_baselines(study, folder, None, quietly)
    assert {yard["metric"] for yard in found.values()} == {"positive_auroc"}
    alone = folder.rounds()[0]["metrics"]["val"]["sites"]  # before training all models are the same
    known = [m["positive_auroc"] for m in alone.values() if m["positive_auroc"] is not None]
    assert found["local_only"]["curve"][0] == [0, pytest.approx(sum(known) / len(known))]
    assert found["centralized"]["curve"][0][1] == folder.rounds()[0]["metrics"]["val"]["pooled"]["positive_auroc"]


def test_public_examples_are_the_coordinators_alone(moons, go):
    people = dry_run_study(moons(public={"fraction": 0.25}), None).dataset
    public = set(people.split_indices["coordinator"].train.tolist())
    assert len(public) == 32
    assert all(public.isdisjoint(people.split_indices[s].train.tolist()) for s in people.sites)
    warm, _ = go(moons(public={"fraction": 0.25, "warmup_epochs": 30}, rounds=1), "warm")
    cold, _ = go(moons(public={"fraction": 0.25}, rounds=1), "cold")
    losses = [f.rounds()[0]["metrics"]["val"]["pooled"]["loss"] for f in (warm, cold)]
    assert losses[0] < losses[1] - 0.05


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"public": {"warmup_epochs": 3}}, "public.fraction > 0"),
        (
            {"evaluation": {"selection_metric": "positive_auroc"}},
            "needs evaluation.positive_class; classes: upper, lower",
        ),
        ({"evaluation": {"positive_class": "middle"}}, "'middle' is no class; classes: upper, lower"),
        ({"round": {"quorum": 5}}, "quorum is 5 but 4 of 4 sites are asked"),
        ({"round": {"quorum": 3}, "client_sampling": {"fraction": 0.5}}, "quorum is 3 but 2 of 4 sites are asked"),
        ({"evaluation": {"patience": 1, "splits": ["test"]}}, "patience looks at val"),
        ({"evaluation": {"target": 0.9, "splits": []}}, "needs a split"),
        ({"round": {"late_updates": "keep"}}, "needs a deadline"),
        ({"strategy": "fedsgd", "local": {"momentum": 0.9}}, "one plain step"),
        ({"strategy": "fedsgd", "local": {"epochs": 7}}, "one step a round"),
        ({"data": {"name": "moons"}, "evaluation": {"patience": 3}}, "needs validation examples"),
        ({"device": "cuda"}, "there is none here"),
        ({"sites": {"count": 4, "speed": [1.0, 2.0]}}, "2 values for 4 sites"),
        ({"sites": {}}, "sites.count"),
        ({"data": {"name": "fashion_mnist", "path": "/nowhere"}, "model": "mlp"}, "/nowhere"),
    ],
)
def test_refusals_come_before_the_first_round(moons, sections, message):
    with pytest.raises(HemofedError) as error:
        dry_run_study(moons(**sections), None)
    assert message in str(error.value)


@needs_fashion
def test_fedsgd_refuses_batchnorm(moons):
    study = moons(
        strategy="fedsgd", model={"name": "cnn28", "norm": "batch"}, data={"name": "fashion_mnist", "limit": 50}
    )
    with pytest.raises(IncompatibleStudyError, match="fedsgd moves no BatchNorm statistics"):
        dry_run_study(study, None)


def test_a_finished_run_is_not_run_again(moons, go):
    folder, results = go(moons(rounds=2))
    before = (folder.path / "rounds.jsonl").read_bytes()
    assert run_simulation(folder.study(), RunFolder.open(folder.path)) == json.loads(json.dumps(results))
    assert (folder.path / "rounds.jsonl").read_bytes() == before


def test_a_seed_decides_everything(moons, go):
    _a, one = go(moons(rounds=3), "a")
    _b, same = go(moons(rounds=3), "b")
    _, other = go(moons(rounds=3, seed=4), "c")
    assert one["test"] == same["test"]
    assert one["test"] != other["test"]
    assert one["hash"] == same["hash"] != other["hash"]


def test_an_unknown_name_in_a_study_is_an_error_and_no_traceback():
    from pipeline.study.toml_file import parse_study

    with pytest.raises(StudyError):
        parse_study("name = 'x'", "x.toml", {})


def test_a_study_in_which_nothing_trained_has_no_result(moons, go):
    with pytest.raises(HemofedError, match=r"no round counted(.|\n)*not finite; lower local\.lr"):
        go(moons(rounds=2, local={"lr": 1e38, "batch_size": 8}))


def test_a_target_met_in_the_last_round_is_met(moons, go):
    folder, _ = go(moons(rounds=30, evaluation={"evaluate_at": "sites", "splits": ["test"], "target": 0.8}), "first")
    rounds = folder.rounds()[-1]["round"]
    _, results = go(
        moons(rounds=rounds, evaluation={"evaluate_at": "sites", "splits": ["test"], "target": 0.8}), "last"
    )
    assert results["stopped"].startswith("target")


def test_yardsticks_take_as_many_passes(moons):
    study = moons(
        local={"steps": 5, "batch_size": 8}, public={"fraction": 0.2, "warmup_epochs": 3}, evaluation={"target": 0.9}
    )
    others = build_baseline_studies(study, 4)
    assert set(others) == {"local_only", "centralized"}  # points are seen by no scanner
    central, local = others["centralized"], others["local_only"]
    assert (central.local.steps, local.local.steps) == (20, 5)
    assert central.public == local.public == study.public  # all begin alike
    assert central.evaluation.target is None


def test_two_processes_do_not_run_one_folder(moons, tmp_path):
    study = moons(rounds=3)
    folder = RunFolder.create(tmp_path / "run", study)

    def watch(record):
        with pytest.raises(RunFolderError, match="another process"):
            run_simulation(study, RunFolder.open(folder.path))

    run_simulation(study, folder, on_round_end=watch)
    assert [r["round"] for r in folder.load_rounds()] == [0, 1, 2, 3]


def test_a_folder_in_which_nothing_was_run_may_be_taken_over(moons, tmp_path):
    RunFolder.create(tmp_path / "run", moons(rounds=2))
    study = moons(rounds=3)
    assert run_simulation(study, RunFolder.create(tmp_path / "run", study))["rounds"] == 3
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder.create(tmp_path / "run", study)


def test_other_hospitals_are_other_data(tmp_path, moons):
    """The same images, dealt by another column, are not the run's data any more."""
    for i in range(40):
        Image.new("L", (8, 8), 6 * i).save(tmp_path / f"{i}.png")

    def manifest(border: int) -> None:
        rows = [f"{i}.png,{'ab'[i % 2]},{'north' if i < border else 'south'}" for i in range(40)]
        (tmp_path / "list.csv").write_text("\n".join(["path,label,hospital", *rows]))

    study = moons(
        data={"name": "folder", "path": str(tmp_path), "manifest": "list.csv", "channels": 1},
        sites={},
        partition={"name": "key", "by": "hospital"},
        model="mlp",
    )
    found = []
    for border in (20, 8):
        manifest(border)
        found.append(dry_run_study(study, None).dataset.fingerprint)
    assert found[0] != found[1]
