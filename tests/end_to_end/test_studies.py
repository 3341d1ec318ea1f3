"""Runs of studies: best round, patience, targets, baselines, public data, evaluation, refusals, data identity."""

from contextlib import nullcontext
from statistics import pstdev

import pytest
import torch
from PIL import Image

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import HemofedError, IncompatibleStudyError, RunFolderError, StudyError
from pipeline.runs.baselines import run_baselines
from pipeline.runs.simulation import dry_run_study, run_simulation
from tests.support.markers import needs_fashion_mnist


def test_best_round_by_validation_is_tested_and_saved(moons, run_study):
    folder, results = run_study(moons(rounds=12))
    by_round = {r.round: r.metrics["val"].pooled.accuracy for r in folder.load_rounds() if r.round}
    best = max(by_round.values())
    assert results.best_round == min(t for t, v in by_round.items() if v == best)
    assert results.selected_by == "val accuracy"
    assert "test" not in folder.load_rounds()[-1].metrics
    assert results.test.pooled.n == 40
    accuracies = {site: metrics.accuracy for site, metrics in results.test.sites.items()}
    assert min(accuracies.values()) < max(accuracies.values())
    assert results.worst_site.accuracy == accuracies[results.worst_site.site] == min(accuracies.values())
    assert results.site_std.accuracy == pytest.approx(pstdev(accuracies.values()))


def test_patience_stops_the_run_early(moons, run_study):
    _, results = run_study(moons(rounds=500, evaluation={"evaluate_at": "sites", "patience": 3}))
    assert results.stop_reason.startswith("early")
    assert results.rounds == results.best_round + 3


def test_target_stops_the_run_when_reached(moons, run_study):
    folder, results = run_study(
        moons(rounds=200, evaluation={"evaluate_at": "sites", "splits": ["test"], "target": 0.8})
    )
    assert results.stop_reason.startswith("target: accuracy")
    values = [r.metrics["test"].pooled.accuracy for r in folder.load_rounds()]
    assert values[-1] >= 0.8
    assert max(values[:-1]) < 0.8


def test_evaluate_at_decides_who_evaluates(moons, run_study):
    for evaluate_at, expected in (
        ("coordinator", {"coordinator"}),
        ("sites", {"pooled", "sites"}),
        ("both", {"coordinator", "pooled", "sites"}),
    ):
        folder, results = run_study(moons(rounds=1, evaluation={"evaluate_at": evaluate_at}), evaluate_at)
        assert folder.load_rounds()[-1].metrics["val"].model_fields_set == expected
        assert results.test.model_fields_set == expected


def test_pooled_site_metrics_equal_the_coordinators(moons, run_study):
    """Without skew both are computed on the same examples."""
    _, results = run_study(moons(rounds=2, evaluation={"evaluate_at": "both"}))
    for metric in ("n", "accuracy", "auroc"):
        assert results.test.pooled.value(metric) == results.test.coordinator.value(metric)
    assert results.test.pooled.loss == pytest.approx(results.test.coordinator.loss)


def test_plane_skew_shifts_only_the_given_sites(moons):
    dataset = dry_run_study(moons(feature_skew={"name": "plane", "sites": 2, "dx": 10.0}), None).dataset
    mean = [float(dataset.pool.x[dataset.split_indices[s].train][:, 0].mean()) for s in dataset.sites]
    assert mean[0] > 8
    assert mean[1] > 8
    assert mean[2] < 3
    assert mean[3] < 3


def test_plane_skew_rotates_by_a_right_angle():
    from sites.population.feature_skew import PlaneSkew

    rotated = PlaneSkew(sites=1, theta=torch.pi / 2).apply(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0, 0)
    torch.testing.assert_close(rotated, torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), atol=1e-6, rtol=0)


def no_callback(study):
    return nullcontext(lambda record: None)


def test_baselines_are_cached(moons, run_study):
    study = moons(rounds=8)
    folder, _ = run_study(study)
    first = run_baselines(study, folder, None, no_callback)
    assert set(first) == {"local_only", "centralized"}
    assert len(first["centralized"].curve) == 9
    assert set(first["local_only"].test.sites) == {"site-01", "site-02", "site-03", "site-04"}
    assert run_baselines(study, folder, None, no_callback) == first


def test_baseline_curves_use_the_positive_class(moons, run_study):
    study = moons(rounds=2, evaluation={"evaluate_at": "sites", "positive_class": "lower"})
    folder, _ = run_study(study)
    baselines = run_baselines(study, folder, None, no_callback)
    assert {baseline.metric for baseline in baselines.values()} == {"positive_auroc"}
    site_metrics = folder.load_rounds()[0].metrics["val"].sites  # before training all models are the same
    values = [m.positive_auroc for m in site_metrics.values() if m.positive_auroc is not None]
    assert baselines["local_only"].curve[0] == (0, pytest.approx(sum(values) / len(values)))
    assert baselines["centralized"].curve[0][1] == folder.load_rounds()[0].metrics["val"].pooled.positive_auroc


def test_public_examples_belong_to_the_coordinator_only(moons, run_study):
    dataset = dry_run_study(moons(public={"fraction": 0.25}), None).dataset
    public = set(dataset.split_indices["coordinator"].train.tolist())
    assert len(public) == 32
    assert all(public.isdisjoint(dataset.split_indices[s].train.tolist()) for s in dataset.sites)
    warm, _ = run_study(moons(public={"fraction": 0.25, "warmup_epochs": 30}, rounds=1), "warm")
    cold, _ = run_study(moons(public={"fraction": 0.25}, rounds=1), "cold")
    losses = [f.load_rounds()[0].metrics["val"].pooled.loss for f in (warm, cold)]
    assert losses[0] < losses[1] - 0.05


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"public": {"warmup_epochs": 3}}, "public.fraction > 0"),
        (
            {"evaluation": {"selection_metric": "positive_auroc"}},
            "needs evaluation.positive_class; classes: upper, lower",
        ),
        ({"evaluation": {"positive_class": "middle"}}, "'middle' is not a class; classes: upper, lower"),
        ({"round": {"quorum": 5}}, "round.quorum is 5, but a round samples 4 of 4 sites"),
        (
            {"round": {"quorum": 3}, "client_sampling": {"fraction": 0.5}},
            "round.quorum is 3, but a round samples 2 of 4 sites",
        ),
        ({"evaluation": {"patience": 1, "splits": ["test"]}}, "patience needs val"),
        ({"evaluation": {"target": 0.9, "splits": []}}, "needs a split"),
        ({"round": {"late_updates": "keep"}}, "needs a deadline"),
        ({"strategy": "fedsgd", "local": {"momentum": 0.9}}, "one plain step"),
        ({"strategy": "fedsgd", "local": {"epochs": 7}}, "one step a round"),
        ({"data": {"name": "moons"}, "evaluation": {"patience": 3}}, "needs validation examples"),
        ({"device": "cuda"}, "this machine has none"),
        ({"sites": {"count": 4, "speed": [1.0, 2.0]}}, "2 values for 4 sites"),
        ({"sites": {}}, "sites.count"),
        ({"data": {"name": "fashion_mnist", "path": "/nowhere"}, "model": "mlp"}, "/nowhere"),
    ],
)
def test_invalid_studies_are_refused_before_the_first_round(moons, sections, message):
    with pytest.raises(HemofedError) as error:
        dry_run_study(moons(**sections), None)
    assert message in str(error.value)


@needs_fashion_mnist
def test_fedsgd_refuses_batchnorm(moons):
    study = moons(
        strategy="fedsgd", model={"name": "cnn28", "norm": "batch"}, data={"name": "fashion_mnist", "limit": 50}
    )
    with pytest.raises(IncompatibleStudyError, match="fedsgd does not update BatchNorm statistics"):
        dry_run_study(study, None)


def test_finished_run_is_not_run_again(moons, run_study):
    folder, results = run_study(moons(rounds=2))
    before = (folder.path / "rounds.jsonl").read_bytes()
    assert run_simulation(folder.load_study(), RunFolder.open(folder.path)) == results
    assert (folder.path / "rounds.jsonl").read_bytes() == before


def test_seed_decides_the_result(moons, run_study):
    _a, one = run_study(moons(rounds=3), "a")
    _b, same = run_study(moons(rounds=3), "b")
    _, other = run_study(moons(rounds=3, seed=4), "c")
    assert one.test == same.test
    assert one.test != other.test
    assert one.study_hash == same.study_hash != other.study_hash


def test_incomplete_study_raises_study_error():
    from pipeline.study.toml_file import parse_study

    with pytest.raises(StudyError):
        parse_study("name = 'x'", "x.toml", {})


def test_run_with_only_void_rounds_has_no_result(moons, run_study):
    with pytest.raises(HemofedError, match=r"all rounds were void(.|\n)*not finite; lower local\.lr"):
        run_study(moons(rounds=2, local={"lr": 1e38, "batch_size": 8}))


def test_target_reached_in_the_last_round_counts(moons, run_study):
    folder, _ = run_study(
        moons(rounds=30, evaluation={"evaluate_at": "sites", "splits": ["test"], "target": 0.8}), "first"
    )
    rounds = folder.load_rounds()[-1].round
    _, results = run_study(
        moons(rounds=rounds, evaluation={"evaluate_at": "sites", "splits": ["test"], "target": 0.8}), "last"
    )
    assert results.stop_reason.startswith("target")


def test_two_processes_cannot_run_the_same_folder(moons, tmp_path):
    study = moons(rounds=3)
    folder = RunFolder.create(tmp_path / "run", study)

    def on_round_end(record):
        with pytest.raises(RunFolderError, match="another process"):
            run_simulation(study, RunFolder.open(folder.path))

    run_simulation(study, folder, on_round_end=on_round_end)
    assert [r.round for r in folder.load_rounds()] == [0, 1, 2, 3]


def test_run_folder_without_rounds_may_be_reused(moons, tmp_path):
    RunFolder.create(tmp_path / "run", moons(rounds=2))
    study = moons(rounds=3)
    assert run_simulation(study, RunFolder.create(tmp_path / "run", study)).rounds == 3
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder.create(tmp_path / "run", study)


def test_fingerprint_depends_on_the_partition_column(tmp_path, moons):
    """The same images with another partition are other data."""
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
    fingerprints = []
    for border in (20, 8):
        manifest(border)
        fingerprints.append(dry_run_study(study, None).dataset.fingerprint)
    assert fingerprints[0] != fingerprints[1]
