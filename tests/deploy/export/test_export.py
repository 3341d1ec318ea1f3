"""From a run to a bundle: the graph answers as the network does, sums become what the card says, nothing is overwritten."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch

from deploy.bundle.bundle import Bundle
from deploy.export.export import export
from deploy.export.onnx_graph import Bedside, answers, check_parity, parity, to_onnx
from deploy.export.quantize import CALIBRATED_ON, quantised
from deploy.inference.metrics import area, balanced
from deploy.inference.runtime import Runtime
from models.networks.base import Model
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import BadData, BadModel, BadRun, Refused
from pipeline.core.registry import choices
from pipeline.protocol.tasks import Lens
from pipeline.runs.score_saved_model import load_model
from pipeline.runs.simulation import run
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


NETS = [({"name": "cnn28"}, (1, 28, 28)), ({"name": "cnn28", "norm": "batch"}, (3, 28, 28)), ({"name": "cnn72"}, (3, 48, 48)),
        ({"name": "mlp"}, (1, 28, 28)), ({"name": "resnet", "depth": 10}, (3, 40, 40)),
        pytest.param({"name": "densenet"}, (3, 32, 32), marks=pytest.mark.slow),
        pytest.param({"name": "efficientnet"}, (3, 32, 32), marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "shape"), NETS, ids=lambda v: v.get("name", "") if isinstance(v, dict) else str(v[0])
)
def test_every_network_becomes_a_graph_that_agrees(table, shape):
    model = choices("models")[table["name"]].model_validate(table)
    assert isinstance(model, Model)
    module = model.make(shape, 4, 1).eval()
    bedside = Bedside(module, shape, None, PLAIN)
    graph = to_onnx(bedside, shape[1:])
    images = photographs(20, shape[1])
    assert parity(bedside, module, graph, images) < 2e-5
    for n in (1, 3, 20):  # the batch is free
        p, traits, measures = answers(graph, images[:n])
        assert p.shape == (n, 4)
        assert np.allclose(p.sum(1), 1, atol=1e-5)
        assert len(traits) == len(measures) == n


def test_preprocessing_is_that_of_the_study():
    """`image` normalisation inside the graph is the sites' own, to half a grey level."""
    from sites.population.color_normalization import Image

    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    how = Image(mean=0.55, std=0.2)
    bedside = Bedside(module, (3, 24, 24), None, how.model_dump())
    images = photographs(10, 24)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    theirs = how.apply(x, torch.arange(10)).float() / 255
    ours = bedside.prepared(torch.from_numpy(images))
    assert (theirs - ours).abs().max() <= 0.5 / 255 + 1e-5


def test_grey_networks_see_what_pillow_calls_grey():
    from PIL import Image

    images = photographs(3, 28)
    bedside = Bedside(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 2)), (1, 28, 28), None, PLAIN)
    grey = np.stack([np.asarray(Image.fromarray(i).convert("L")) for i in images])
    assert np.abs(bedside.prepared(torch.from_numpy(images))[:, 0].numpy() * 255 - grey).max() < 1


def test_a_graph_that_differs_is_not_exported():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    bedside = Bedside(module, (3, 24, 24), None, PLAIN)
    graph = to_onnx(bedside, (24, 24))
    with torch.no_grad():
        module[1].bias += torch.tensor([0.0, 0.01])
    with pytest.raises(BadModel, match="nothing was exported"):
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

    with pytest.raises(BadModel, match="cannot be written as ONNX"):
        to_onnx(Bedside(Strange(), (3, 24, 24), None, PLAIN), (24, 24))


def test_the_bundle_tells_what_the_run_measured(world):
    bundle, results = world.bundle, json.loads((world.run.path / "results.json").read_text())
    card = bundle.card
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
    from deploy.bundle.operating_points import binned, log_odds, points_of
    from sites.population.simulated_sites import populate

    study = world.run.study()
    people = populate(study, None, torch.device("cpu"))
    rows = torch.cat([people.examples[s].val for s in people.sites])
    images = (people.pool.x[rows].permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()
    runtime = Runtime(world.bundle, "fp32")
    p = runtime.answer(images).probabilities
    own = people.pool.y[rows].numpy() == 1
    points, _ = points_of(binned(log_odds(p, 1), own, 4096))
    told = world.bundle.calibration.points
    for mine, theirs in zip(points, told, strict=True):
        assert abs(mine.tp - theirs.tp) <= 1  # floats differ in the last digit between two runtimes
        assert abs(mine.fp - theirs.fp) <= 1
    assert told[0].specificity >= 0.998
    refused = np.mean([why is not None for why in runtime.answer(images).refused])
    assert refused <= world.bundle.reference.false_alarms + 0.01


def test_temperature_lowers_the_loss(world):
    calibration = world.bundle.calibration
    assert calibration.loss < calibration.loss_before


def test_monai_reads_the_metadata(world):
    from monai.bundle import ConfigParser

    meta = ConfigParser.load_config_file(str(world.made.folder / "metadata.json"))
    needed = {"version", "changelog", "monai_version", "pytorch_version", "numpy_version", "task", "description", "authors",
              "copyright", "network_data_format"}  # fmt: skip
    assert needed <= meta.keys()
    assert meta["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": "other", "1": "schistocyte"}


def test_int8_answers_as_fp32_does(world, images):
    precise, small = (Runtime(world.bundle, p).answer(images).probabilities for p in ("fp32", "int8"))
    assert np.abs(precise - small).max() < 0.1
    assert (precise.argmax(1) == small.argmax(1)).mean() > 0.98
    assert len(world.bundle.graph("int8")) < 0.5 * len(world.bundle.graph("fp32"))


def test_a_quantised_model_that_loses_too_much_is_left_out(monkeypatch):
    """A network of which eight bits make something else: its two halves cancel but for a millionth."""
    import deploy.export.quantize as q

    module = choices("models")["cnn28"]().make((3, 28, 28), 2, 1).eval()
    graph = to_onnx(Bedside(module, (3, 28, 28), None, PLAIN), (28, 28))
    other = choices("models")["cnn28"]().make((3, 28, 28), 2, 8).eval()
    broken = to_onnx(Bedside(other, (3, 28, 28), None, PLAIN), (28, 28))
    monkeypatch.setattr(q, "_quantise", lambda graph, images: broken)
    found = quantised(graph, photographs(CALIBRATED_ON + 60, 28), None, None)
    assert found.graph is None
    assert "got another class" in found.reason


def test_scores_are_scikit_learns():
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 300)
    p = np.round(rng.random(300), 2)  # with ties
    both = np.stack([1 - p, p], 1).astype(np.float32)
    assert area(both, y, 1) == pytest.approx(roc_auc_score(y, p))
    assert balanced(both, y) == pytest.approx(balanced_accuracy_score(y, both.argmax(1)))


def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(world, tmp_path):
    key = keys.generate()
    (tmp_path / "there").mkdir()
    with pytest.raises(BadRun, match="not overwritten"):
        export(world.run, "global", tmp_path / "there", key)
    with pytest.raises(BadRun, match="no model 'globl'"):
        export(world.run, "globl", tmp_path / "new", key)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_points_have_no_bundle(go, tmp_path):
    folder, _ = go(moons_study(rounds=1))
    with pytest.raises(Refused, match="bundles are for images"):
        export(folder, "global", tmp_path / "b", keys.generate())


def small(**sections):
    table = {
        "name": "tiny", "rounds": 1, "seed": 1, "sites": {"count": 2}, "model": "cnn72",
        "data": {"name": "synthetic_smear", "cells": 200, "patients": 20, "size": 40, "schistocytes": 0.3, "val": 0.3},
        "local": {"lr": 0.01, "batch": 16, "epochs": 1},
        "evaluation": {"where": "sites", "positive": "schistocyte"},
    }  # fmt: skip
    return Study.model_validate(table | sections)


def exported(study: Study, name: str, tmp_path):
    folder = RunFolder.create(tmp_path / "run", study)
    run(study, folder)
    made = export(folder, name, tmp_path / "bundle", keys.generate())
    from deploy.bundle.trust_store import Trust

    trust = Trust(tmp_path / "trust.json")
    trust.add("x", made.key)
    return folder, made, Bundle.open(made.folder, trust)


@pytest.mark.parametrize(("strategy", "name"), [({"name": "ifca"}, "group/"), ({"name": "fedper"}, "site/site-01"),
                                                 ({"name": "fedper"}, "global")])  # fmt: skip
def test_groups_and_sites_have_bundles_of_their_own(strategy, name, tmp_path):
    study = small(strategy=strategy)
    folder = RunFolder.create(tmp_path / "run", study)
    run(study, folder)
    if name == "group/":
        groups = set(folder.rounds()[-1]["groups"].values())
        name = f"group/{sorted(groups)[0]}"
    made = export(folder, name, tmp_path / "bundle", keys.generate())
    assert made.card["model"] == name
    assert made.warnings == ()
    assert made.reference is not None
    module, _ = load_model(folder, name)
    assert module is not None


def test_a_run_without_a_profile_is_exported_and_says_what_is_missing(tmp_path):
    study = small(evaluation={"where": "sites", "positive": "schistocyte", "profile": False})
    _, made, bundle = exported(study, "global", tmp_path)
    assert "no guard" in made.warnings[0]
    assert bundle.reference is None
    assert bundle.calibration.points == ()
    runtime = Runtime(bundle)
    assert runtime.answer(photographs(2, 40)).refused == (None, None)


def test_judged_at_the_coordinator(tmp_path):
    study = small(evaluation={"where": "coordinator", "positive": "schistocyte"})
    _, made, _ = exported(study, "global", tmp_path)
    assert made.calibration.points
    assert made.reference is not None


@pytest.mark.parametrize("normalise", ["image", "site", "background"])
def test_normalised_studies_see_the_same_at_the_bedside(normalise, tmp_path):
    """The runtime, given images as a site has them, answers as the network does to the site's normalised ones."""
    study = small(normalise=normalise, sites={"count": 1})
    folder, _, bundle = exported(study, "global", tmp_path)
    data = study.data.load(None, study.seed)
    rows = data.where("train")
    runtime = Runtime(bundle, "fp32")
    ours = runtime.answer(np.ascontiguousarray(data.x[rows].permute(0, 2, 3, 1).numpy())).probabilities
    module, _ = load_model(folder, "global")
    x = study.normalise.apply(data.x, rows)[rows].float() / 255
    with torch.inference_mode(), warnings.catch_warnings():
        theirs = (module(x) / bundle.calibration.temperature).softmax(1).numpy()
    assert np.abs(ours - theirs).max() < (5e-3 if normalise == "image" else 1e-4)  # half a grey level


def test_a_plugins_normalisation_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.export.export.NORMALISED", {"site": ()})  # as if `none` came from a plugin
    with pytest.raises(Refused, match="comes from a plugin"):
        export(world.run, "global", tmp_path / "b", keys.generate())
    assert list(tmp_path.iterdir()) == []


def test_single_cells_of_a_slide_tell_its_colours_together(tmp_path, images):
    from deploy.imaging.images import Picture
    from deploy.slide.reader import Reader

    _, _, bundle = exported(small(normalise="site", sites={"count": 1}), "global", tmp_path)
    reader = Reader(Runtime(bundle), None)
    pictures = [Picture(str(n), image) for n, image in enumerate(images[:25])]
    assert len(reader.cells(pictures)) == 25
    with pytest.raises(BadData, match="at least 20"):
        reader.cells(pictures[:5])


def test_a_profile_of_another_version_is_refused():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 2))
    with pytest.raises(BadRun, match="another version"):
        Bedside(module, (3, 24, 24), Lens(torch.zeros(5), torch.eye(5), torch.zeros(2, 5), 1.0), PLAIN)
