"""Studies on cells: scanners, color normalization, augmentation, contact sheets, intervals, baselines, public data."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
from PIL import Image

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import IncompatibleStudyError, RunFolderError
from pipeline.core.files import exclusive_lock
from pipeline.records.run_results import RunResults
from pipeline.runs.baselines import build_baseline_studies, run_baselines
from pipeline.runs.score_saved_model import score_saved_model
from pipeline.runs.simulation import dry_run_study, run_simulation
from pipeline.study.schema import Study
from pipeline.study.toml_file import PACKAGED_STUDIES, find_study, load_study
from tests.support.markers import REAL_CELLS, needs_real_cells
from tests.support.studies import final_weights


def make_smear_study(**sections) -> Study:
    raw = {
        "name": "test",
        "rounds": 2,
        "seed": 3,
        "data": {"name": "synthetic_smear", "cells": 400, "size": 24, "patients": 24, "val": 0.2},
        "sites": {"count": 3},
        "feature_skew": {"name": "scanner"},
        "model": "cnn28",
        "local": {"optimizer": "adam", "lr": 0.001, "batch_size": 16, "class_balance": "root"},
        "augmentation": {"flip": True, "rotate": 180, "zoom": 0.1, "elastic": 1.0, "color": 0.1, "light": 0.1},
        "evaluation": {"evaluate_at": "sites", "positive_class": "schistocyte", "selection_metric": "positive_auroc"},
    }
    return Study.model_validate(raw | sections)


def load_training_images(study: Study, site: int) -> torch.Tensor:
    dataset = dry_run_study(study, None).dataset
    return dataset.pool.inputs(dataset.split_indices[dataset.sites[site]].train)


def test_run_on_cells_writes_contact_sheets_intervals_and_curves(run_study):
    folder, results = run_study(make_smear_study())
    index = json.loads((folder.path / "cells" / "index.json").read_text())
    assert list(index) == ["site-01", "site-02", "site-03"]
    assert "warm_lamp" in index["site-01"]["acquisition"]
    assert all((folder.path / "cells" / entry["file"]).read_bytes().startswith(b"\x89PNG") for entry in index.values())
    intervals = results.intervals
    assert (intervals.privacy_unit, intervals.num_units) == ("patient", len(list_test_patients(folder.load_study())))
    assert set(intervals.sites) == set(index)
    assert any(site.roc for site in results.test.sites.values())
    assert RunResults.read(folder.path) == results


def list_test_patients(study: Study) -> set[int]:
    dataset = dry_run_study(study, None).dataset
    return {p for s in dataset.sites for p in dataset.pool.unit_ids[dataset.split_indices[s].test].tolist()}


def test_resumed_run_with_augmentation_equals_the_uninterrupted_run(run_study, tmp_path):
    study = make_smear_study()
    uninterrupted, _ = run_study(study, "uninterrupted")
    folder = RunFolder.create(tmp_path / "interrupted", study)

    def on_round_end(record):
        if record.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_simulation(study, folder, on_round_end=on_round_end)
    run_simulation(study, RunFolder.open(folder.path))
    assert torch.equal(final_weights(uninterrupted), final_weights(folder))


def test_scanner_skew_changes_images_only():
    with_scanners = dry_run_study(make_smear_study(), None).dataset
    without = dry_run_study(make_smear_study(feature_skew="none"), None).dataset
    for site in without.sites:
        a, b = with_scanners.split_indices[site], without.split_indices[site]
        assert torch.equal(with_scanners.pool.y[a.test], without.pool.y[b.test])
        assert torch.equal(with_scanners.pool.unit_ids[a.val], without.pool.unit_ids[b.val])
        assert not torch.equal(with_scanners.pool.inputs(a.test), without.pool.inputs(b.test))
    assert with_scanners.acquisition_descriptions.keys() == set(without.sites)
    assert not without.acquisition_descriptions


def test_site_color_normalization_reduces_the_spread_between_sites():
    def spread_between_sites(normalization: str) -> float:
        study = make_smear_study(normalization=normalization)
        means = torch.stack([load_training_images(study, site).mean((0, 2, 3)) for site in range(3)])
        return float(means.std(0).mean())

    assert spread_between_sites("none") > 0.08
    assert spread_between_sites("site") < 0.005


def test_patient_is_at_one_site_and_in_one_split():
    dataset = dry_run_study(make_smear_study(feature_skew="none"), None).dataset
    patients = [
        set(dataset.pool.unit_ids[rows].tolist())
        for site in dataset.sites
        for rows in (
            dataset.split_indices[site].train,
            dataset.split_indices[site].val,
            dataset.split_indices[site].test,
        )
    ]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 24


def test_baselines_of_a_study_with_scanner_skew():
    studies = build_baseline_studies(make_smear_study(), 3)
    assert set(studies) == {"local_only", "centralized", "unskewed", "normalized"}
    assert studies["unskewed"].feature_skew.name == "none"
    assert studies["normalized"].normalization.name == "site"
    assert len({study.hash for study in studies.values()}) == 4
    assert "normalized" not in build_baseline_studies(make_smear_study(normalization="image"), 3)


def test_baselines_without_a_user_cache_use_separate_folders(run_study, monkeypatch, tmp_path):
    """`unskewed` and `normalized` have the same strategy but must not share a cached result."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr("pipeline.runs.baselines.user_cache_path", lambda name: tmp_path / "file")
    study = make_smear_study(rounds=1)
    folder, _ = run_study(study)
    baselines = run_baselines(study, folder, None, lambda s: nullcontext(lambda record: None))
    studies = [RunFolder(p).load_study() for p in (folder.path / "baselines").iterdir()]
    assert {(s.strategy.name, s.feature_skew.name, s.normalization.name) for s in studies} == {
        ("local_only", "scanner", "none"),
        ("centralized", "scanner", "none"),
        ("fedavg", "none", "none"),
        ("fedavg", "scanner", "site"),
    }
    assert baselines["unskewed"].test != baselines["normalized"].test
    assert not list((folder.path / "baselines").glob("*/cells"))  # images stay in the run folder


def test_fingerprint_depends_on_the_partition_and_patients():
    one = dry_run_study(make_smear_study(partition={"name": "iid"}, seed=3), None)
    other = dry_run_study(make_smear_study(sites={"count": 4}), None)
    assert one.dataset.fingerprint != other.dataset.fingerprint
    shifted = fingerprint_with_shifted_patients(make_smear_study())
    assert shifted != one.dataset.fingerprint


def fingerprint_with_shifted_patients(study: Study) -> str:
    """The same pixels, labels and splits, but every cell belongs to another patient."""
    data = study.data.load(None, study.seed)
    key = data.keys["patient"]
    shifted = replace(data, keys=data.keys | {"patient": replace(key, codes=key.codes.roll(7))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(study.data), "load", lambda self, root, seed: shifted)
        return dry_run_study(study, None).dataset.fingerprint


def test_centralized_training_samples_each_image_once_a_pass(moons):
    study = make_smear_study(partition="iid_resampled", strategy="centralized")
    dataset = dry_run_study(study, None).dataset
    indices = dataset.split_indices["coordinator"]
    assert len(indices.train) == 3 * indices.num_examples  # three scanners' views; a pass samples one of each image


def test_public_data_exclude_the_studys_cells():
    own = {"name": "synthetic_smear", "cells": 400, "size": 24, "patients": 24, "val": 0.2}
    dataset = dry_run_study(
        make_smear_study(public={"data": own, "warmup_epochs": 1}, feature_skew="none"), None
    ).dataset
    test_images = {
        dataset.pool.x[row].numpy().tobytes() for site in dataset.sites for row in dataset.split_indices[site].test
    }
    assert not test_images & {dataset.pool.x[row].numpy().tobytes() for row in dataset.public_indices}


def test_fedsgd_refuses_augmentation():
    with pytest.raises(IncompatibleStudyError, match="no batch to sample or augment"):
        dry_run_study(make_smear_study(strategy="fedsgd", local={"lr": 0.1}), None)


def test_positive_class_without_examples_is_refused():
    with pytest.raises(IncompatibleStudyError, match="there is no schistocyte in train and val and test"):
        dry_run_study(
            make_smear_study(data={"name": "synthetic_smear", "cells": 200, "size": 24, "schistocytes": 0.0}), None
        )


def test_missing_test_split_is_refused_and_missing_validation_split_is_reported():
    few = {"name": "synthetic_smear", "cells": 100, "size": 24, "patients": 1}
    with pytest.raises(IncompatibleStudyError, match=r"no patient has few enough cells for data\.test"):
        dry_run_study(make_smear_study(data=few, sites={"count": 1}), None)
    dry_run = dry_run_study(
        make_smear_study(data=few | {"patients": 3, "test": 0.3, "val": 0.02}, sites={"count": 1}), None
    )
    assert "without validation examples" in dry_run.dataset.skipped[-1]


def test_manifest_without_a_test_split_is_accepted(tmp_path, moons):
    """The manifest's split column overrides data.test."""
    for n in range(12):
        Image.new("L", (8, 8), 20 * n).save(tmp_path / f"{n}.png")
    rows = [f"{n}.png,{'ab'[n % 2]},{'val' if n > 8 else 'train'}" for n in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    data = {"name": "folder", "path": str(tmp_path), "manifest": "list.csv", "channels": 1}
    assert not len(
        dry_run_study(moons(data=data, sites={"count": 2}, model="mlp"), None).dataset.split_indices["site-01"].test
    )


@pytest.mark.parametrize("normalization", ["none", "site", "background"])
def test_saved_model_scores_as_in_its_run(run_study, normalization):
    study = make_smear_study(feature_skew="none", normalization=normalization, sites={"count": 1}, rounds=1)
    folder, results = run_study(study, normalization)
    scores = score_saved_model(folder, None, None, "global", "test", {})
    assert scores.metrics.loss == pytest.approx(results.test.pooled.loss, rel=1e-6)
    assert scores.normalized == normalization


@needs_real_cells
def test_model_of_rendered_cells_is_scored_on_real_cells(run_study):
    folder, _ = run_study(make_smear_study(rounds=1, feature_skew="none"))
    scores = score_saved_model(folder, REAL_CELLS, "smear_cells", "global", "test", {})
    assert (scores.metrics.n, scores.classes) == (4036, ("other", "schistocyte"))


def test_exclusive_lock_waits_for_the_other_process(tmp_path):
    (tmp_path / "baseline").mkdir()
    order = []

    def second():
        with exclusive_lock(tmp_path / "baseline", wait=True):
            order.append("second")

    with exclusive_lock(tmp_path / "baseline"):
        with pytest.raises(RunFolderError, match="another process"), exclusive_lock(tmp_path / "baseline"):
            pass
        waiting = Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_augmentation_of_points_is_refused(moons):
    with pytest.raises(IncompatibleStudyError, match=r"leave \[augmentation\] out"):
        dry_run_study(moons(augmentation={"flip": True}), None)


def test_warmup_on_public_cells_uses_no_site_data(run_study):
    public = {"data": {"name": "synthetic_smear", "cells": 300, "patients": 10, "size": 24}, "warmup_epochs": 2}
    study = make_smear_study(rounds=1, public=public)
    dataset = dry_run_study(study, None).dataset
    assert len(dataset.public_indices) == 300
    assert set(dataset.pool.unit_ids[dataset.public_indices].tolist()) == {-1}
    train_rows = torch.cat([dataset.split_indices[s].train for s in dataset.sites])
    assert not set(train_rows.tolist()) & set(dataset.public_indices.tolist())
    warm, _ = run_study(study, "warm")
    cold, _ = run_study(make_smear_study(rounds=1), "cold")
    assert warm.load_rounds()[0].metrics != cold.load_rounds()[0].metrics
    assert study.hash != make_smear_study(rounds=1).hash


def test_public_data_with_other_classes_or_a_second_source_are_refused():
    public = {"data": {"name": "synthetic_smear", "cells": 300, "size": 24, "task": "types"}, "warmup_epochs": 2}
    with pytest.raises(IncompatibleStudyError, match="set the same size and task for both"):
        dry_run_study(make_smear_study(public=public), None)
    with pytest.raises(IncompatibleStudyError, match="give one of them"):
        dry_run_study(make_smear_study(public={"fraction": 0.1, "data": {"name": "synthetic_smear", "size": 24}}), None)


@pytest.mark.parametrize("name", [path.stem for path in sorted(PACKAGED_STUDIES.glob("*.toml"))])
def test_packaged_study_loads(name):
    study = load_study(find_study(name))
    assert study.name == name
    assert study.description


@needs_real_cells
def test_study_on_real_cells_of_two_batches(run_study, tmp_path):
    overrides = {"rounds": 1, "data.size": 40, "partition.only": ["batch-1", "batch-3"]}
    overrides |= {
        "public.data.size": 40,
        "public.data.cells": 400,
        "public.data.patients": 10,
        "public.warmup_epochs": 1,
    }
    study = load_study(find_study("schistocytes"), overrides)
    folder = RunFolder.create(tmp_path / "run", study)
    results = run_simulation(study, folder, REAL_CELLS)
    assert results.intervals.privacy_unit == "group"
    assert set(results.test.sites) == {"batch-1", "batch-3"}
    assert (Path(folder.path) / "cells" / "index.json").is_file()
