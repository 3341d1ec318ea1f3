"""Export of a run: parity of graph and network, operating points from sums, model card, int8, normalizations."""

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
from tests.support.studies import moons_study

NO_NORMALIZATION = {"name": "none"}


def make_images(n: int, size: int) -> np.ndarray:
    """Smooth colored blotches, uint8 (n, size, size, 3)."""
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
def test_onnx_parity_of_every_network(table, shape):
    model = registered_components("models")[table["name"]].model_validate(table)
    assert isinstance(model, ModelConfig)
    module = model.init_network(shape, 4, 1).eval()
    export_module = ExportModule(module, shape, None, NO_NORMALIZATION)
    graph = to_onnx(export_module, shape[1:])
    images = make_images(20, shape[1])
    assert max_probability_difference(export_module, module, graph, images) < 2e-5
    for n in (1, 3, 20):  # any batch size
        p, features, measures = run_graph(graph, images[:n])
        assert p.shape == (n, 4)
        assert np.allclose(p.sum(1), 1, atol=1e-5)
        assert len(features) == len(measures) == n


def test_image_normalization_inside_the_graph():
    """The `image` normalization inside the graph equals the sites' to half a gray level."""
    from sites.population.color_normalization import ImageNormalization

    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    how = ImageNormalization(mean=0.55, std=0.2)
    export_module = ExportModule(module, (3, 24, 24), None, how.model_dump())
    images = make_images(10, 24)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    theirs = how.apply(x, torch.arange(10)).float() / 255
    ours = export_module.preprocess(torch.from_numpy(images))
    assert (theirs - ours).abs().max() <= 0.5 / 255 + 1e-5


def test_grayscale_preprocessing_equals_pillow():
    from PIL import Image

    images = make_images(3, 28)
    export_module = ExportModule(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 2)), (1, 28, 28), None, NO_NORMALIZATION
    )
    grey = np.stack([np.asarray(Image.fromarray(i).convert("L")) for i in images])
    assert np.abs(export_module.preprocess(torch.from_numpy(images))[:, 0].numpy() * 255 - grey).max() < 1


def test_parity_failure_exports_nothing():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    export_module = ExportModule(module, (3, 24, 24), None, NO_NORMALIZATION)
    graph = to_onnx(export_module, (24, 24))
    with torch.no_grad():
        module[1].bias += torch.tensor([0.0, 0.01])
    with pytest.raises(ModelError, match="nothing was exported"):
        check_parity(export_module, module, graph, make_images(5, 24))


def test_onnx_export_error_is_explained():
    class Strange(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(3 * 24 * 24, 2)

        def forward(self, x):
            if float(x.sum()) > 1e9:  # data-dependent control flow cannot be exported
                x = x * 2
            return self.dense(x.flatten(1))

    with pytest.raises(ModelError, match="cannot be exported to ONNX"):
        to_onnx(ExportModule(Strange(), (3, 24, 24), None, NO_NORMALIZATION), (24, 24))


def test_model_card_has_the_results_of_the_run(exported_run):
    bundle, results = exported_run.bundle, json.loads((exported_run.run_folder.path / "results.json").read_text())
    card = bundle.model_card
    assert card["training"]["strategy"] == "fedavg"
    assert card["metrics"]["pooled"]["positive_auroc"] == results["test"]["pooled"]["positive_auroc"]
    assert set(card["data"]) == set(results["test"]["sites"])
    assert card["export"]["parity"]["images"] == 500
    assert card["export"]["parity"]["largest"] <= 1e-4
    assert card["notice"] in "research use only, not a medical device"
    assert "Research use only" in bundle.files["card.md"].decode()
    assert bundle.manifest.precisions == ("fp32", "int8")
    assert bundle.manifest.num_tta_views == 8
    assert bundle.manifest.crop_diameters == pytest.approx(72 / 41)


def test_operating_points_equal_those_of_validation_images(exported_run):
    """Counts them from the images, which the export does not read."""
    from deploy.bundle.operating_points import bin_scores, build_operating_points, compute_log_odds
    from sites.population.simulated_sites import load_federated_data

    study = exported_run.run_folder.load_study()
    dataset = load_federated_data(study, None, torch.device("cpu"))
    rows = torch.cat([dataset.split_indices[s].val for s in dataset.sites])
    images = (dataset.pool.x[rows].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    runtime = BundleRuntime(exported_run.bundle, "fp32")
    p = runtime.predict(images).probabilities
    own = dataset.pool.y[rows].numpy() == 1
    points, _ = build_operating_points(bin_scores(compute_log_odds(p, 1), own, 4096))
    points_of_bundle = exported_run.bundle.calibration.operating_points
    for mine, theirs in zip(points, points_of_bundle, strict=True):
        assert abs(mine.tp - theirs.tp) <= 1  # floats differ in the last digit between two runtimes
        assert abs(mine.fp - theirs.fp) <= 1
    assert points_of_bundle[0].specificity >= 0.998
    refused = np.mean([why is not None for why in runtime.predict(images).rejection_reasons])
    assert refused <= exported_run.bundle.ood_reference.false_alarm_rate + 0.01


def test_calibration_temperature_lowers_the_loss(exported_run):
    calibration = exported_run.bundle.calibration
    assert calibration.loss < calibration.loss_before


def test_monai_metadata(exported_run):
    from monai.bundle import ConfigParser

    meta = ConfigParser.load_config_file(str(exported_run.export.folder / "metadata.json"))
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


def test_int8_predictions_are_close_to_fp32(exported_run, images):
    precise, small = (BundleRuntime(exported_run.bundle, p).predict(images).probabilities for p in ("fp32", "int8"))
    assert np.abs(precise - small).max() < 0.1
    assert (precise.argmax(1) == small.argmax(1)).mean() > 0.98
    assert len(exported_run.bundle.onnx_graph("int8")) < 0.5 * len(exported_run.bundle.onnx_graph("fp32"))


def test_int8_model_with_too_large_loss_is_left_out(monkeypatch):
    """Quantization is replaced by another network's graph."""
    import deploy.export.quantize as q

    module = registered_components("models")["cnn28"]().init_network((3, 28, 28), 2, 1).eval()
    graph = to_onnx(ExportModule(module, (3, 28, 28), None, NO_NORMALIZATION), (28, 28))
    other = registered_components("models")["cnn28"]().init_network((3, 28, 28), 2, 8).eval()
    broken = to_onnx(ExportModule(other, (3, 28, 28), None, NO_NORMALIZATION), (28, 28))
    monkeypatch.setattr(q, "_quantize_static", lambda graph, images: broken)
    found = quantize_model(graph, make_images(NUM_CALIBRATION_IMAGES + 60, 28), None, None)
    assert found.graph is None
    assert "got another class" in found.reason


def test_auroc_and_balanced_accuracy_equal_scikit_learn():
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    p = np.round(rng.random(300), 2)  # with ties
    both = np.stack([1 - p, p], 1).astype(np.float32)
    assert compute_auroc(both, y, 1) == pytest.approx(roc_auc_score(y, p))
    assert compute_balanced_accuracy(both, y) == pytest.approx(balanced_accuracy_score(y, both.argmax(1)))


def test_export_overwrites_nothing_and_is_atomic(exported_run, tmp_path):
    key = keys.generate_key()
    (tmp_path / "there").mkdir()
    with pytest.raises(RunFolderError, match="not overwritten"):
        export_bundle(exported_run.run_folder, "global", tmp_path / "there", key)
    with pytest.raises(RunFolderError, match="no model 'globl'"):
        export_bundle(exported_run.run_folder, "globl", tmp_path / "new", key)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_export_of_a_study_without_images_is_refused(run_study, tmp_path):
    folder, _ = run_study(moons_study(rounds=1))
    with pytest.raises(IncompatibleStudyError, match="bundles are for images"):
        export_bundle(folder, "global", tmp_path / "b", keys.generate_key())


def make_study(**sections):
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


def export_study(study: Study, name: str, tmp_path):
    folder = RunFolder.create(tmp_path / "run", study)
    run_simulation(study, folder)
    made = export_bundle(folder, name, tmp_path / "bundle", keys.generate_key())
    from deploy.bundle.trust_store import TrustStore

    trust = TrustStore(tmp_path / "trust.json")
    trust.add("x", made.public_key)
    return folder, made, ModelBundle.open(made.folder, trust)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [({"name": "ifca"}, "cluster/"), ({"name": "fedper"}, "site/site-01"), ({"name": "fedper"}, "global")],
)
def test_export_of_cluster_and_site_models(strategy, name, tmp_path):
    study = make_study(strategy=strategy)
    folder = RunFolder.create(tmp_path / "run", study)
    run_simulation(study, folder)
    if name == "cluster/":
        groups = set(folder.load_rounds()[-1].clusters.values())
        name = f"cluster/{sorted(groups)[0]}"
    made = export_bundle(folder, name, tmp_path / "bundle", keys.generate_key())
    assert made.model_card["model"] == name
    assert made.warnings == ()
    assert made.ood_reference is not None
    module, _ = load_model(folder, name)
    assert module is not None


def test_export_without_validation_profile_warns(tmp_path):
    study = make_study(
        evaluation={"evaluate_at": "sites", "positive_class": "schistocyte", "validation_profile": False}
    )
    _, made, bundle = export_study(study, "global", tmp_path)
    assert "no out-of-distribution guard" in made.warnings[0]
    assert bundle.ood_reference is None
    assert bundle.calibration.operating_points == ()
    runtime = BundleRuntime(bundle)
    assert runtime.predict(make_images(2, 40)).rejection_reasons == (None, None)


def test_export_of_a_run_evaluated_at_the_coordinator(tmp_path):
    study = make_study(evaluation={"evaluate_at": "coordinator", "positive_class": "schistocyte"})
    _, made, _ = export_study(study, "global", tmp_path)
    assert made.calibration.operating_points
    assert made.ood_reference is not None


@pytest.mark.parametrize("normalization_name", ["image", "site", "background"])
def test_color_normalization_at_the_edge_equals_that_of_the_site(normalization_name, tmp_path):
    """The runtime predicts for raw images what the network predicts for the site's normalized images."""
    study = make_study(normalization=normalization_name, sites={"count": 1})
    folder, _, bundle = export_study(study, "global", tmp_path)
    data = study.data.load(None, study.seed)
    rows = data.rows_in_split("train")
    runtime = BundleRuntime(bundle, "fp32")
    ours = runtime.predict(np.ascontiguousarray(data.x[rows].permute(0, 2, 3, 1).numpy())).probabilities
    module, _ = load_model(folder, "global")
    x = study.normalization.apply(data.x, rows)[rows].float() / 255
    with torch.inference_mode(), warnings.catch_warnings():
        theirs = (module(x) / bundle.calibration.temperature).softmax(1).numpy()
    assert np.abs(ours - theirs).max() < (5e-3 if normalization_name == "image" else 1e-4)  # half a gray level


def test_plugin_normalization_is_refused(exported_run, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.export.export.RUNTIME_NORMALIZATIONS", {"site": ()})  # as if `none` came from a plugin
    with pytest.raises(IncompatibleStudyError, match="comes from a plugin"):
        export_bundle(exported_run.run_folder, "global", tmp_path / "b", keys.generate_key())
    assert list(tmp_path.iterdir()) == []


def test_site_normalization_uses_all_single_cells_of_a_slide(tmp_path, images):
    from deploy.imaging.input_image import InputImage
    from deploy.slide.reader import SlideReader

    _, _, bundle = export_study(make_study(normalization="site", sites={"count": 1}), "global", tmp_path)
    reader = SlideReader(BundleRuntime(bundle), None)
    pictures = [InputImage(str(n), image) for n, image in enumerate(images[:25])]
    assert len(reader.read_cells(pictures)) == 25
    with pytest.raises(DataError, match="at least 20"):
        reader.read_cells(pictures[:5])


def test_validation_profile_of_another_version_is_refused():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    with pytest.raises(RunFolderError, match="another version"):
        ExportModule(
            module,
            (3, 24, 24),
            FeatureWhitening(torch.zeros(5), torch.eye(5), torch.zeros(2, 5), 1.0),
            NO_NORMALIZATION,
        )
