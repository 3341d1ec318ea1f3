"""Studies on cells through the front door: scanners, normalisation, balance, augmentation, sheets and intervals."""

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
from pipeline.runs.baselines import build_baseline_studies, run_baselines
from pipeline.runs.score_saved_model import score_saved_model
from pipeline.runs.simulation import dry_run_study, run_simulation
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import PACKAGED_STUDIES, find_study
from tests.conftest import REAL_CELLS, final_weights, needs_real_cells


def smear_study(**sections) -> Study:
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


def seen_by(study: Study, site: int) -> torch.Tensor:
    people = dry_run_study(study, None).dataset
    return people.pool.inputs(people.split_indices[people.sites[site]].train)


def test_a_run_on_cells_leaves_sheets_intervals_and_curves(go):
    folder, results = go(smear_study())
    index = json.loads((folder.path / "cells" / "index.json").read_text())
    assert list(index) == ["site-01", "site-02", "site-03"]
    assert "warm_lamp" in index["site-01"]["words"]
    assert all((folder.path / "cells" / entry["file"]).read_bytes().startswith(b"\x89PNG") for entry in index.values())
    found = results["intervals"]
    assert (found["unit"], found["units"]) == ("patient", len(patients_in_test(folder.study())))
    assert set(found["sites"]) == set(index)
    assert any("roc" in site for site in results["test"]["sites"].values())
    assert json.loads((folder.path / "results.json").read_text()) == json.loads(json.dumps(results))


def patients_in_test(study: Study) -> set[int]:
    people = dry_run_study(study, None).dataset
    return {p for s in people.sites for p in people.pool.unit_ids[people.split_indices[s].test].tolist()}


def test_stopped_and_resumed_augmented_training_is_the_undisturbed_run(go, tmp_path):
    study = smear_study()
    whole, _ = go(study, "whole")
    folder = RunFolder.create(tmp_path / "cut", study)

    def watch(record):
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_simulation(study, folder, on_round_end=watch)
    run_simulation(study, RunFolder.open(folder.path))
    assert torch.equal(final_weights(whole), final_weights(folder))


def test_scanners_change_what_sites_see_and_nothing_else():
    with_scanners, without = (
        dry_run_study(smear_study(), None).dataset,
        dry_run_study(smear_study(feature_skew="none"), None).dataset,
    )
    for site in without.sites:
        a, b = with_scanners.split_indices[site], without.split_indices[site]
        assert torch.equal(with_scanners.pool.y[a.test], without.pool.y[b.test])
        assert torch.equal(with_scanners.pool.unit_ids[a.val], without.pool.unit_ids[b.val])
        assert not torch.equal(with_scanners.pool.inputs(a.test), without.pool.inputs(b.test))
    assert with_scanners.acquisition_descriptions.keys() == set(without.sites)
    assert not without.acquisition_descriptions


def test_site_normalisation_brings_sites_together():
    def apart(normalise: str) -> float:
        study = smear_study(normalization=normalise)
        means = torch.stack([seen_by(study, site).mean((0, 2, 3)) for site in range(3)])
        return float(means.std(0).mean())

    assert apart("none") > 0.08
    assert apart("site") < 0.005


def test_a_patient_is_at_one_site_and_in_one_split():
    people = dry_run_study(smear_study(feature_skew="none"), None).dataset
    held = [
        set(people.pool.unit_ids[rows].tolist())
        for site in people.sites
        for rows in (people.split_indices[site].train, people.split_indices[site].val, people.split_indices[site].test)
    ]
    assert sum(map(len, held)) == len(set.union(*held)) == 24


def test_yardsticks_of_a_study_with_scanners():
    found = build_baseline_studies(smear_study(), 3)
    assert set(found) == {"local_only", "centralized", "unskewed", "normalised"}
    assert found["unskewed"].feature_skew.name == "none"
    assert found["normalised"].normalization.name == "site"
    assert len({study.hash for study in found.values()}) == 4
    assert "normalised" not in build_baseline_studies(smear_study(normalization="image"), 3)


def test_yardsticks_without_a_cache_keep_apart(go, monkeypatch, tmp_path):
    """`unskewed` and `normalised` have the same strategy: one must not find the other's result."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr("pipeline.runs.baselines.user_cache_path", lambda name: tmp_path / "file")
    study = smear_study(rounds=1)
    folder, _ = go(study)
    found = run_baselines(study, folder, None, lambda s: nullcontext(lambda record: None))
    kept = [RunFolder(p).load_study() for p in (folder.path / "baselines").iterdir()]
    assert {(s.strategy.name, s.feature_skew.name, s.normalization.name) for s in kept} == {
        ("local_only", "scanner", "none"),
        ("centralized", "scanner", "none"),
        ("fedavg", "none", "none"),
        ("fedavg", "scanner", "site"),
    }
    assert found["unskewed"]["test"] != found["normalised"]["test"]
    assert not list((folder.path / "baselines").glob("*/cells"))  # images stay in the run folder


def test_who_holds_what_is_part_of_the_fingerprint_also_behind_scanners():
    one, other = (
        dry_run_study(smear_study(partition={"name": "iid"}, seed=3), None),
        dry_run_study(smear_study(sites={"count": 4}), None),
    )
    assert one.dataset.fingerprint != other.dataset.fingerprint
    moved = replace_patients(smear_study())
    assert moved != one.dataset.fingerprint


def replace_patients(study: Study) -> str:
    """The same pixels, labels and splits, but every patient's cells belong to the next one."""
    data = study.data.load(None, study.seed)
    key = data.keys["patient"]
    turned = replace(data, keys=data.keys | {"patient": replace(key, codes=key.codes.roll(7))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(study.data), "load", lambda self, root, seed: turned)
        return dry_run_study(study, None).dataset.fingerprint


def test_pooled_views_of_one_image_count_once(moons):
    study = smear_study(partition="iid_resampled", strategy="centralized")
    people = dry_run_study(study, None).dataset
    held = people.split_indices["coordinator"]
    assert len(held.train) == 3 * held.num_examples  # three scanners' views, as many drawn a pass as there are images


def test_public_data_never_hold_the_studys_own_cells():
    own = {"name": "synthetic_smear", "cells": 400, "size": 24, "patients": 24, "val": 0.2}
    people = dry_run_study(smear_study(public={"data": own, "warmup_epochs": 1}, feature_skew="none"), None).dataset
    held = {people.pool.x[row].numpy().tobytes() for site in people.sites for row in people.split_indices[site].test}
    assert not held & {people.pool.x[row].numpy().tobytes() for row in people.public_indices}


def test_whole_gradients_cannot_be_augmented():
    with pytest.raises(IncompatibleStudyError, match="no batch to draw or augment"):
        dry_run_study(smear_study(strategy="fedsgd", local={"lr": 0.1}), None)


def test_a_class_that_nobody_holds_is_refused():
    with pytest.raises(IncompatibleStudyError, match="there is no schistocyte in train and val and test"):
        dry_run_study(
            smear_study(data={"name": "synthetic_smear", "cells": 200, "size": 24, "schistocytes": 0.0}), None
        )


def test_nothing_to_test_is_refused_and_nothing_to_validate_is_told():
    few = {"name": "synthetic_smear", "cells": 100, "size": 24, "patients": 1}
    with pytest.raises(IncompatibleStudyError, match="no whole patient was small enough for"):
        dry_run_study(smear_study(data=few, sites={"count": 1}), None)
    told = dry_run_study(smear_study(data=few | {"patients": 3, "test": 0.3, "val": 0.02}, sites={"count": 1}), None)
    assert "there is no validation" in told.dataset.skipped[-1]


def test_a_manifest_may_name_no_test(tmp_path, moons):
    """Its split column decides, whatever data.test says."""
    for n in range(12):
        Image.new("L", (8, 8), 20 * n).save(tmp_path / f"{n}.png")
    rows = [f"{n}.png,{'ab'[n % 2]},{'val' if n > 8 else 'train'}" for n in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    data = {"name": "folder", "path": str(tmp_path), "manifest": "list.csv", "channels": 1}
    assert not len(
        dry_run_study(moons(data=data, sites={"count": 2}, model="mlp"), None).dataset.split_indices["site-01"].test
    )


@pytest.mark.parametrize("normalise", ["none", "site", "background"])
def test_a_saved_model_scores_as_in_its_run(go, normalise):
    study = smear_study(feature_skew="none", normalization=normalise, sites={"count": 1}, rounds=1)
    folder, results = go(study, normalise)
    found = score_saved_model(folder, None, None, "global", "test", {})
    assert found["loss"] == pytest.approx(results["test"]["pooled"]["loss"], rel=1e-6)
    assert found["normalised"] == normalise


@needs_real_cells
def test_a_model_of_rendered_cells_is_scored_on_real_ones(go):
    folder, _ = go(smear_study(rounds=1, feature_skew="none"))
    found = score_saved_model(folder, REAL_CELLS, "smear_cells", "global", "test", {})
    assert (found["n"], found["classes"]) == (4036, ["other", "schistocyte"])


def test_two_runs_that_need_one_yardstick_wait_for_each_other(tmp_path):
    (tmp_path / "yard").mkdir()
    order = []

    def second():
        with exclusive_lock(tmp_path / "yard", wait=True):
            order.append("second")

    with exclusive_lock(tmp_path / "yard"):
        with pytest.raises(RunFolderError, match="another process"), exclusive_lock(tmp_path / "yard"):
            pass
        waiting = Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_points_cannot_be_augmented(moons):
    with pytest.raises(IncompatibleStudyError, match=r"leave \[augment\] out"):
        dry_run_study(moons(augmentation={"flip": True}), None)


def test_a_start_on_rendered_cells_is_on_nobodys(go):
    public = {"data": {"name": "synthetic_smear", "cells": 300, "patients": 10, "size": 24}, "warmup_epochs": 2}
    study = smear_study(rounds=1, public=public)
    people = dry_run_study(study, None).dataset
    assert len(people.public_indices) == 300
    assert set(people.pool.unit_ids[people.public_indices].tolist()) == {-1}
    held = torch.cat([people.split_indices[s].train for s in people.sites])
    assert not set(held.tolist()) & set(people.public_indices.tolist())
    warm, _ = go(study, "warm")
    cold, _ = go(smear_study(rounds=1), "cold")
    assert warm.rounds()[0]["metrics"] != cold.rounds()[0]["metrics"]
    assert study.hash != smear_study(rounds=1).hash


def test_public_data_of_another_kind_are_refused():
    public = {"data": {"name": "synthetic_smear", "cells": 300, "size": 24, "task": "types"}, "warmup_epochs": 2}
    with pytest.raises(IncompatibleStudyError, match="set its size and task alike"):
        dry_run_study(smear_study(public=public), None)
    with pytest.raises(IncompatibleStudyError, match="give one of them"):
        dry_run_study(smear_study(public={"fraction": 0.1, "data": {"name": "synthetic_smear", "size": 24}}), None)


@pytest.mark.parametrize("name", [path.stem for path in sorted(PACKAGED_STUDIES.glob("*.toml"))])
def test_packaged_studies_can_be_read(name):
    study = load_study(find_study(name))
    assert study.name == name
    assert study.description


@needs_real_cells
def test_real_cells_of_two_batches_train(go, tmp_path):
    sets = {"rounds": 1, "data.size": 40, "partition.only": ["batch-1", "batch-3"]}
    sets |= {"public.data.size": 40, "public.data.cells": 400, "public.data.patients": 10, "public.warmup_epochs": 1}
    study = load_study(find_study("schistocytes"), sets)
    folder = RunFolder.create(tmp_path / "run", study)
    results = run_simulation(study, folder, REAL_CELLS)
    assert results["intervals"]["unit"] == "group"
    assert set(results["test"]["sites"]) == {"batch-1", "batch-3"}
    assert (Path(folder.path) / "cells" / "index.json").is_file()
