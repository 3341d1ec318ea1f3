"""Runs from Python: the same as those of the command, typed errors, and a process that is as before."""

from __future__ import annotations

import json
import signal
import warnings
from pathlib import Path

import pytest
import torch

import hemofed
from pipeline.coordinator.run_folder import RunFolder
from tests.support.studies import final_weights, make_dp_smear_study

STUDY = {
    "name": "small",
    "rounds": 5,
    "seed": 3,
    "data": {"name": "moons", "points": 200, "val": 0.2},
    "sites": {"count": 4},
    "model": "moons_net",
    "local": {"lr": 0.1, "batch_size": 8, "epochs": 1},
    "evaluation": {"evaluate_at": "sites"},
}


@pytest.fixture(autouse=True)
def own_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def three_torch_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)  # no study of these tests sets three
    yield
    torch.set_num_threads(num_threads)


def weights_of(run: hemofed.Run) -> torch.Tensor:
    return final_weights(RunFolder.open(run.path))


def test_a_study_is_a_dict_a_file_a_packaged_name_or_a_study(tmp_path):
    from_dict = hemofed.load_study(STUDY)
    file = tmp_path / "study.toml"
    file.write_text(
        'name = "small"\nrounds = 5\nseed = 3\n[data]\nname = "moons"\npoints = 200\nval = 0.2\n[sites]\ncount = 4\n'
        '[model]\nname = "moons_net"\n[local]\nlr = 0.1\nbatch_size = 8\nepochs = 1\n[evaluation]\nevaluate_at = "sites"\n'
    )
    assert hemofed.load_study(file) == hemofed.load_study(str(file)) == from_dict
    assert hemofed.load_study(from_dict) == from_dict
    assert hemofed.load_study(STUDY | {"local": from_dict.local}).hash == from_dict.hash
    assert hemofed.load_study("moons-demo").data.name == "moons"


def test_overrides_are_those_of_the_command():
    study = hemofed.load_study(STUDY, {"local.lr": 0.25, "strategy": "fedprox", "strategy.mu": 0.75, "local.steps": 7})
    assert (study.local.lr, study.strategy.name, study.strategy.mu) == (0.25, "fedprox", 0.75)
    assert (study.local.steps, study.local.epochs) == (7, None)
    assert STUDY["local"] == {"lr": 0.1, "batch_size": 8, "epochs": 1}  # the dict of the caller stays
    assert hemofed.load_study(study, {"rounds": 9}).rounds == 9


def test_relative_data_of_a_dict_start_at_the_working_directory(tmp_path):
    study = hemofed.load_study(STUDY | {"data": {"name": "moons", "path": "points"}})
    assert study.data.path == tmp_path / "points"


def test_run_gives_what_the_run_folder_holds(capfd):
    records = []
    run = hemofed.run(STUDY, out="here", progress=records.append)
    assert run == hemofed.load_run("here") == hemofed.Run(Path("here"))
    assert run.is_finished
    assert run.study == hemofed.load_study(STUDY)
    assert [record.round for record in records] == [record.round for record in run.rounds] == [0, 1, 2, 3, 4, 5]
    assert run.results.to_dict() == json.loads(Path("here/results.json").read_text())
    assert (run.models, run.results.baselines) == (("global",), {})
    assert run.classes == ("upper", "lower")
    assert Path("here/report.html").exists()
    assert capfd.readouterr() == ("", "")  # nothing is printed unless asked


def test_default_folder_is_free():
    paths = [hemofed.run(STUDY, overrides={"rounds": 1}).path for _ in range(3)]
    assert paths == [Path("runs/small"), Path("runs/small-2"), Path("runs/small-3")]


def test_progress_prints_a_line_per_round(capfd):
    hemofed.run(STUDY, overrides={"rounds": 2}, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("small round") == 3


def test_personal_models_and_baselines():
    run = hemofed.run(STUDY, overrides={"strategy": "finetune", "rounds": 2})
    sites = [f"site-0{n}" for n in (1, 2, 3, 4)]
    assert run.models == ("global", *(f"site/{site}" for site in sites))
    assert list(run.personal_models) == sites
    assert list(run.results.baselines) == ["local_only"]  # the default for personalized studies
    points = torch.tensor([[0.25, -0.5]])
    personal, common = run.personal_models["site-03"](points), run.load_model("global")(points)
    assert torch.equal(personal, run.load_model("site/site-03")(points))
    assert not torch.equal(personal, common)
    assert not run.cluster_models


def test_cluster_models():
    run = hemofed.run(STUDY, overrides={"strategy": "ifca", "strategy.k": 2, "rounds": 2})
    assert list(run.cluster_models) == ["0", "1"]


def test_baselines_can_be_added_later():
    rounds = []
    run = hemofed.run(STUDY, overrides={"rounds": 2}, progress=rounds.append)
    run = run.resume(baselines=True, progress=rounds.append)
    assert list(run.results.baselines) == ["local_only", "centralized"]
    assert len(rounds) == 3  # of the study alone


def test_interrupted_run_resumes_bit_for_bit(three_torch_threads):
    expected = hemofed.run(STUDY, out="uninterrupted")
    filters = list(warnings.filters)

    def interrupt(record):
        if record.round == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        hemofed.run(STUDY, out="interrupted", progress=interrupt)
    assert interrupted.value.__notes__ == ["nothing is lost; continue with: hemofed.load_run('interrupted').resume()"]
    assert (torch.get_num_threads(), warnings.filters) == (3, filters)
    run = hemofed.load_run("interrupted")
    assert not run.is_finished
    with pytest.raises(hemofed.RunFolderError, match=r"results\.json"):
        _ = run.results
    resumed = run.resume()
    assert resumed == run
    assert torch.equal(weights_of(resumed), weights_of(expected))
    assert resumed.results.test == expected.results.test


def test_threads_and_warning_filters_are_as_before(three_torch_threads):
    filters = list(warnings.filters)
    run = hemofed.run(STUDY, overrides={"num_threads": 2, "rounds": 1})
    assert run.results.software["threads"] == 2
    assert (torch.get_num_threads(), warnings.filters) == (3, filters)
    with pytest.raises(ZeroDivisionError):
        hemofed.run(STUDY, overrides={"num_threads": 2, "rounds": 1}, progress=lambda record: 1 / 0)
    assert (torch.get_num_threads(), warnings.filters) == (3, filters)


@pytest.mark.parametrize("trainer", ["sequential", "threaded"])
def test_private_training_warns_of_nothing_and_leaves_the_filters(trainer):
    study = make_dp_smear_study(
        model={"name": "mlp", "hidden": [4]},
        privacy={"dp_sgd": {"privacy_unit": "example", "epsilon": 8.0}},  # with Opacus's hooks
        trainer=trainer,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # before pytest's own filters
        filters = list(warnings.filters)
        hemofed.run(study)
        assert warnings.filters == filters


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (
            lambda: hemofed.run("moons-dmo"),
            hemofed.StudyError,
            "no packaged study of that name; did you mean 'moons-demo'",
        ),
        (
            lambda: hemofed.run(STUDY, overrides={"local.lr": -1}),
            hemofed.StudyError,
            "local.lr: should be greater than 0",
        ),
        (lambda: hemofed.run(STUDY | {"strategy": "fedprx"}), hemofed.StudyError, "did you mean 'fedprox'"),
        (
            lambda: hemofed.run(STUDY | {"data": "folder", "model": "mlp"}, data="/nowhere"),
            hemofed.MissingDataError,
            "/nowhere",
        ),
        (lambda: hemofed.load_run("nowhere"), hemofed.RunFolderError, "nowhere is not a run folder"),
    ],
)
def test_errors_are_typed_and_name_the_cure(action, error, message):
    with pytest.raises(error, match=message) as raised:
        action()
    assert isinstance(raised.value, hemofed.HemofedError)


def test_an_unknown_model_is_named_with_the_valid_ones():
    run = hemofed.run(STUDY, overrides={"rounds": 1})
    with pytest.raises(hemofed.RunFolderError, match="did you mean 'global'"):
        run.load_model("globl")


def test_an_existing_run_is_not_overwritten():
    hemofed.run(STUDY, overrides={"rounds": 1}, out="once")
    with pytest.raises(hemofed.RunFolderError, match="once is not empty"):
        hemofed.run(STUDY, out="once")
