"""From a run to a bundle: the graph answers as the network does, sums become what the card says, nothing is overwritten."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

from deploy.bundle.bundle import ModelBundle
from deploy.export.export import export_bundle
from deploy.export.onnx_graph import ExportModule, check_parity, max_probability_difference, run_graph, to_onnx
from deploy.export.quantize import NUM_CALIBRATION_IMAGES, quantize_model
from deploy.inference.metrics import compute_auroc, compute_balanced_accuracy
from deploy.inference.runtime import BundleRuntime
from models.networks.base import ModelConfig
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import DataError, IncompatibleStudyError, ModelError, RunFolderError
from pipeline.core.registry import registered_components
from pipeline.protocol.tasks import FeatureWhitening
from pipeline.runs.score_saved_model import load_model
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from privacy.ledger import keys
from tests.conftest import moons_study

PLAIN = {"name": "none"}


def photographs(n: int, size: int) -> np.ndarray:
    """Blotches: smooth, coloured, uint8 (n, size, size, 3)."""
    rng = np.random.default_rng(3)
    coarse = torch.from_numpy(rng.integers(0, 256, (n, 3, 6, 6)).astype(np.float32))
    fine = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    return fine.permute(0, 2, 3, 1).clamp(0, 255).to(torch.uint8).numpy().copy()


NETS = [
    ({"name": "cnn28"}, (1, 28, 28)),
    ({"name": "cnn28", "norm": "batch"}, (3, 28, 28)),
    ({"name": "cnn72"}, (3, 48, 48)),
    ({"name": "mlp"}, (1, 28, 28)),
    ({"name": "resnet", "depth": 10}, (3, 40, 40)),
    pytest.param({"name": "densenet"}, (3, 32, 32), marks=pytest.mark.slow),
    pytest.param({"name": "efficientnet"}, (3, 32, 32), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("table", "shape"), NETS, ids=lambda v: v.get("name", "") if isinstance(v, dict) else str(v[0])
)
def test_every_network_becomes_a_graph_that_agrees(table, shape):
    model = registered_components("models")[table["name"]].model_validate(table)
    assert isinstance(model, ModelConfig)
    module = model.init_network(shape, 4, 1).eval()
    bedside = ExportModule(module, shape, None, PLAIN)
    graph = to_onnx(bedside, shape[1:])
    images = photographs(20, shape[1])
    assert max_probability_difference(bedside, module, graph, images) < 2e-5
    for n in (1, 3, 20):  # the batch is free
        p, traits, measures = run_graph(graph, images[:n])
        assert p.shape == (n, 4)
        assert np.allclose(p.sum(1), 1, atol=1e-5)
        assert len(traits) == len(measures) == n


def test_preprocessing_is_that_of_the_study():
    """`image` normalisation inside the graph is the sites' own, to half a grey level."""
    from sites.population.color_normalization import ImageNormalization

    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    how = ImageNormalization(mean=0.55, std=0.2)
    bedside = ExportModule(module, (3, 24, 24), None, how.model_dump())
    images = photographs(10, 24)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    theirs = how.apply(x, torch.arange(10)).float() / 255
    ours = bedside.preprocess(torch.from_numpy(images))
    assert (theirs - ours).abs().max() <= 0.5 / 255 + 1e-5


def test_grey_networks_see_what_pillow_calls_grey():
    from PIL import Image

    images = photographs(3, 28)
    bedside = ExportModule(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 2)), (1, 28, 28), None, PLAIN)
    grey = np.stack([np.asarray(Image.fromarray(i).convert("L")) for i in images])
    assert np.abs(bedside.preprocess(torch.from_numpy(images))[:, 0].numpy() * 255 - grey).max() < 1


def test_a_graph_that_differs_is_not_exported():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    bedside = ExportModule(module, (3, 24, 24), None, PLAIN)
    graph = to_onnx(bedside, (24, 24))
    with torch.no_grad():
        module[1].bias += torch.tensor([0.0, 0.01])
    with pytest.raises(ModelError, match="nothing was exported"):
        check_parity(bedside, module, graph, photographs(5, 24))


def test_what_onnx_does_not_know_is_told():
    class Strange(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(3 * 24 * 24, 2)

        def forward(self, x):
            if float(x.sum()) > 1e9:  # a decision by data cannot be drawn
                x = x * 2
            return self.dense(x.flatten(1))

    with pytest.raises(ModelError, match="cannot be written as ONNX"):
        to_onnx(ExportModule(Strange(), (3, 24, 24), None, PLAIN), (24, 24))


def test_the_bundle_tells_what_the_run_measured(world):
    bundle, results = world.bundle, json.loads((world.run.path / "results.json").read_text())
    card = bundle.model_card
    assert card["training"]["strategy"] == "fedavg"
    assert card["metrics"]["pooled"]["positive_auroc"] == results["test"]["pooled"]["positive_auroc"]
    assert set(card["data"]) == set(results["test"]["sites"])
    assert card["export"]["parity"]["images"] == 500
    assert card["export"]["parity"]["largest"] <= 1e-4
    assert card["notice"] in "research use only, not a medical device"
    assert "Research use only" in bundle.files["card.md"].decode()
    assert bundle.manifest.precisions == ("fp32", "int8")
    assert bundle.manifest.turns == 8
    assert bundle.manifest.window == pytest.approx(72 / 41)


def test_operating_points_are_those_of_the_sites_validation_images(world):
    """Counted again from the images themselves, which the export never saw."""
    from deploy.bundle.operating_points import bin_scores, build_operating_points, compute_log_odds
    from sites.population.simulated_sites import load_federated_data

    study = world.run.study()
    people = load_federated_data(study, None, torch.device("cpu"))
    rows = torch.cat([people.split_indices[s].val for s in people.sites])
    images = (people.pool.x[rows].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    runtime = BundleRuntime(world.bundle, "fp32")
    p = runtime.predict(images).probabilities
    own = people.pool.y[rows].numpy() == 1
    points, _ = build_operating_points(bin_scores(compute_log_odds(p, 1), own, 4096))
    told = world.bundle.calibration.points
    for mine, theirs in zip(points, told, strict=True):
        assert abs(mine.tp - theirs.tp) <= 1  # floats differ in the last digit between two runtimes
        assert abs(mine.fp - theirs.fp) <= 1
    assert told[0].specificity >= 0.998
    refused = np.mean([why is not None for why in runtime.predict(images).rejection_reasons])
    assert refused <= world.bundle.ood_reference.false_alarm_rate + 0.01


def test_temperature_lowers_the_loss(world):
    calibration = world.bundle.calibration
    assert calibration.loss < calibration.loss_before


def test_monai_reads_the_metadata(world):
    from monai.bundle import ConfigParser

    meta = ConfigParser.load_config_file(str(world.made.folder / "metadata.json"))
    needed = {
        "version",
        "changelog",
        "monai_version",
        "pytorch_version",
        "numpy_version",
        "task",
        "description",
        "authors",
        "copyright",
        "network_data_format",
    }
    assert needed <= meta.keys()
    assert meta["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": "other", "1": "schistocyte"}


def test_int8_answers_as_fp32_does(world, images):
    precise, small = (BundleRuntime(world.bundle, p).predict(images).probabilities for p in ("fp32", "int8"))
    assert np.abs(precise - small).max() < 0.1
    assert (precise.argmax(1) == small.argmax(1)).mean() > 0.98
    assert len(world.bundle.graph("int8")) < 0.5 * len(world.bundle.graph("fp32"))


def test_a_quantised_model_that_loses_too_much_is_left_out(monkeypatch):
    """A network of which eight bits make something else: its two halves cancel but for a millionth."""
    import deploy.export.quantize as q

    module = registered_components("models")["cnn28"]().make((3, 28, 28), 2, 1).eval()
    graph = to_onnx(ExportModule(module, (3, 28, 28), None, PLAIN), (28, 28))
    other = registered_components("models")["cnn28"]().make((3, 28, 28), 2, 8).eval()
    broken = to_onnx(ExportModule(other, (3, 28, 28), None, PLAIN), (28, 28))
    monkeypatch.setattr(q, "_quantise", lambda graph, images: broken)
    found = quantize_model(graph, photographs(NUM_CALIBRATION_IMAGES + 60, 28), None, None)
    assert found.graph is None
    assert "got another class" in found.reason


def test_scores_are_scikit_learns():
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    p = np.round(rng.random(300), 2)  # with ties
    both = np.stack([1 - p, p], 1).astype(np.float32)
    assert compute_auroc(both, y, 1) == pytest.approx(roc_auc_score(y, p))
    assert compute_balanced_accuracy(both, y) == pytest.approx(balanced_accuracy_score(y, both.argmax(1)))


def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(world, tmp_path):
    key = keys.generate_key()
    (tmp_path / "there").mkdir()
    with pytest.raises(RunFolderError, match="not overwritten"):
        export_bundle(world.run, "global", tmp_path / "there", key)
    with pytest.raises(RunFolderError, match="no model 'globl'"):
        export_bundle(world.run, "globl", tmp_path / "new", key)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_points_have_no_bundle(go, tmp_path):
    folder, _ = go(moons_study(rounds=1))
    with pytest.raises(IncompatibleStudyError, match="bundles are for images"):
        export_bundle(folder, "global", tmp_path / "b", keys.generate_key())


def small(**sections):
    table = {
        "name": "tiny",
        "rounds": 1,
        "seed": 1,
        "sites": {"count": 2},
        "model": "cnn72",
        "data": {"name": "synthetic_smear", "cells": 200, "patients": 20, "size": 40, "schistocytes": 0.3, "val": 0.3},
        "local": {"lr": 0.01, "batch_size": 16, "epochs": 1},
        "evaluation": {"evaluate_at": "sites", "positive_class": "schistocyte"},
    }
    return Study.model_validate(table | sections)


def exported(study: Study, name: str, tmp_path):
    folder = RunFolder.create(tmp_path / "run", study)
    run_simulation(study, folder)
    made = export_bundle(folder, name, tmp_path / "bundle", keys.generate_key())
    from deploy.bundle.trust_store import TrustStore

    trust = TrustStore(tmp_path / "trust.json")
    trust.add("x", made.public_key)
    return folder, made, ModelBundle.open(made.folder, trust)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [({"name": "ifca"}, "group/"), ({"name": "fedper"}, "site/site-01"), ({"name": "fedper"}, "global")],
)
def test_groups_and_sites_have_bundles_of_their_own(strategy, name, tmp_path):
    study = small(strategy=strategy)
    folder = RunFolder.create(tmp_path / "run", study)
    run_simulation(study, folder)
    if name == "group/":
        groups = set(folder.load_rounds()[-1]["groups"].values())
        name = f"group/{sorted(groups)[0]}"
    made = export_bundle(folder, name, tmp_path / "bundle", keys.generate_key())
    assert made.model_card["model"] == name
    assert made.warnings == ()
    assert made.ood_reference is not None
    module, _ = load_model(folder, name)
    assert module is not None


def test_a_run_without_a_profile_is_exported_and_says_what_is_missing(tmp_path):
    study = small(evaluation={"evaluate_at": "sites", "positive_class": "schistocyte", "validation_profile": False})
    _, made, bundle = exported(study, "global", tmp_path)
    assert "no guard" in made.warnings[0]
    assert bundle.ood_reference is None
    assert bundle.calibration.operating_points == ()
    runtime = BundleRuntime(bundle)
    assert runtime.predict(photographs(2, 40)).rejection_reasons == (None, None)


def test_judged_at_the_coordinator(tmp_path):
    study = small(evaluation={"evaluate_at": "coordinator", "positive_class": "schistocyte"})
    _, made, _ = exported(study, "global", tmp_path)
    assert made.calibration.operating_points
    assert made.ood_reference is not None


@pytest.mark.parametrize("normalise", ["image", "site", "background"])
def test_normalised_studies_see_the_same_at_the_bedside(normalise, tmp_path):
    """The runtime, given images as a site has them, answers as the network does to the site's normalised ones."""
    study = small(normalization=normalise, sites={"count": 1})
    folder, _, bundle = exported(study, "global", tmp_path)
    data = study.data.load(None, study.seed)
    rows = data.rows_in_split("train")
    runtime = BundleRuntime(bundle, "fp32")
    ours = runtime.predict(np.ascontiguousarray(data.x[rows].permute(0, 2, 3, 1).numpy())).probabilities
    module, _ = load_model(folder, "global")
    x = study.normalization.apply(data.x, rows)[rows].float() / 255
    with torch.inference_mode(), warnings.catch_warnings():
        theirs = (module(x) / bundle.calibration.temperature).softmax(1).numpy()
    assert np.abs(ours - theirs).max() < (5e-3 if normalise == "image" else 1e-4)  # half a grey level


def test_a_plugins_normalisation_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.export.export.NORMALISED", {"site": ()})  # as if `none` came from a plugin
    with pytest.raises(IncompatibleStudyError, match="comes from a plugin"):
        export_bundle(world.run, "global", tmp_path / "b", keys.generate_key())
    assert list(tmp_path.iterdir()) == []


def test_single_cells_of_a_slide_tell_its_colours_together(tmp_path, images):
    from deploy.imaging.images import InputImage
    from deploy.slide.reader import SlideReader

    _, _, bundle = exported(small(normalization="site", sites={"count": 1}), "global", tmp_path)
    reader = SlideReader(BundleRuntime(bundle), None)
    pictures = [InputImage(str(n), image) for n, image in enumerate(images[:25])]
    assert len(reader.read_cells(pictures)) == 25
    with pytest.raises(DataError, match="at least 20"):
        reader.read_cells(pictures[:5])


def test_a_profile_of_another_version_is_refused():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    with pytest.raises(RunFolderError, match="another version"):
        ExportModule(module, (3, 24, 24), FeatureWhitening(torch.zeros(5), torch.eye(5), torch.zeros(2, 5), 1.0), PLAIN)
