"""Resizing, test-time augmentation and cropping equal the training side's; the runtime imports no torch."""

from __future__ import annotations

import subprocess
import sys

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from deploy.bundle.bundle import ModelBundle
from deploy.imaging.input_image import InputImage
from deploy.inference.resize import resize_images
from deploy.inference.runtime import BundleRuntime
from deploy.inference.test_time_augmentation import iter_orientations, predict_with_tta
from deploy.slide.reader import SlideReader, crop_cells
from pipeline.core.errors import BundleError, IncompatibleStudyError
from sites.data.renderer.field import crop_rendered_cells, render_field
from tests.support.edge.slides import count_slide


@pytest.mark.parametrize(("old", "new"), [(72, 48), (100, 33), (41, 40), (72, 24)])
def test_resize_area_equals_opencv(old, new):
    images = np.random.default_rng(0).integers(0, 256, (3, old, old, 3), dtype=np.uint8)
    theirs = np.stack([cv2.resize(i, (new, new), interpolation=cv2.INTER_AREA) for i in images])
    assert np.abs(resize_images(images, (new, new), "area").astype(int) - theirs).max() <= 1


@pytest.mark.parametrize(("old", "new"), [(72, 48), (30, 48), (50, 50)])
def test_resize_triangle_equals_pillow(old, new):
    images = np.random.default_rng(0).integers(0, 256, (3, old, old, 3), dtype=np.uint8)
    theirs = np.stack([np.asarray(Image.fromarray(i).resize((new, new), Image.Resampling.BILINEAR)) for i in images])
    assert np.abs(resize_images(images, (new, new), "triangle").astype(int) - theirs).max() <= 1


def test_tta_orientations_equal_those_of_training():
    from models.probe.feature_probe import iter_orientations as torch_views

    images = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3), dtype=np.uint8)
    x = torch.from_numpy(images).permute(0, 3, 1, 2)
    ours = [view.tobytes() for view in iter_orientations(images, 8)]
    theirs = [view.permute(0, 2, 3, 1).contiguous().numpy().tobytes() for view in torch_views(x, 8)]
    assert ours == theirs
    assert len(set(ours)) == 8


def test_tta_averages_logits():
    answers = iter([np.array([[0.2, 0.8]], np.float32), np.array([[0.6, 0.4]], np.float32)])

    def run(view):
        return next(answers), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)

    p = predict_with_tta(run, np.zeros((1, 4, 4, 3), np.uint8), 2)[0]
    odds = (np.log(0.8 / 0.2) + np.log(0.4 / 0.6)) / 2
    assert p[0, 1] == pytest.approx(1 / (1 + np.exp(-odds)))


def test_tta_predictions_are_rotation_invariant(runtime, images):
    upright, turned = (runtime.predict(i).probabilities for i in (images[:40], np.rot90(images[:40], 1, (1, 2))))
    assert np.abs(upright - turned).max() < 1e-4


def test_crop_cells_equals_training_crops():
    field = render_field(4)
    ours = crop_cells(field.image, [(float(x), float(y)) for x, y in field.points], 72)
    assert np.array_equal(ours, crop_rendered_cells(field))


def test_predictions_do_not_depend_on_the_batch(runtime, images):
    """More images than one batch; alone and together."""
    many = np.concatenate([images[:300], images[:5]])
    together = runtime.predict(many).probabilities
    assert np.allclose(together[:5], together[300:], atol=1e-6)
    assert np.allclose(runtime.predict(images[:1]).probabilities, together[:1], atol=1e-5)
    assert runtime.predict(images[:0]).rejection_reasons == ()


def test_read_field_counts_cells(runtime):
    field = render_field(2, types=[0] * 40, num_unlabeled=0)
    reader = SlideReader(runtime, runtime.calibration.find_point("even"))
    reading = reader.read_image(InputImage("field", field.image))
    assert reading.kind == "field"
    inside = [
        any(c.box[0] <= x < c.box[2] and c.box[1] <= y < c.box[3] for c in reading.cells) for x, y in field.points
    ]
    assert np.mean(inside) > 0.9
    record = reading.to_dict()
    assert record["path"] == "field"
    assert all(
        len(c["box"]) == 4 and {"class", "probability", "is_counted", "exclusion_reason"} <= c.keys()
        for c in record["cells"]
    )
    assert sum(record["counts"].values()) == sum(c["is_counted"] for c in record["cells"])
    counts = count_slide([reading], runtime, reader.operating_point).counts
    assert counts.num_found == len(reading.cells) == counts.num_counted + sum(counts.excluded.values())
    assert reader.read_image(InputImage("field", field.image)).to_dict() == record


def test_read_field_at_another_magnification(runtime):
    field = render_field(6, types=[0] * 30, num_unlabeled=0)
    reader = SlideReader(runtime, runtime.calibration.find_point("even"))
    large = cv2.resize(field.image, None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC)
    once, twice = (reader.read_image(InputImage("f", image)) for image in (field.image, large))
    assert twice.rbc_diameter_px > 1.5 * once.rbc_diameter_px
    counts = [sum(c.kind == "red" for c in r.cells) for r in (once, twice)]
    assert abs(counts[0] - counts[1]) <= 2


def test_small_images_are_single_cells_by_default(runtime, images):
    reading = SlideReader(runtime, None).read_image(InputImage("c", images[0]))
    assert reading.kind == "cell"
    assert sum(reading.to_dict()["class_probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert SlideReader(runtime, None, "field").read_image(InputImage("c", images[0])).kind == "field"


def test_bundle_without_crop_size_refuses_fields(runtime, exported_run, monkeypatch):
    plain = BundleRuntime(exported_run.bundle)
    manifest = plain.bundle.manifest.model_copy(update={"crop_diameters": None})
    monkeypatch.setitem(plain.bundle.__dict__, "manifest", manifest)
    with pytest.raises(IncompatibleStudyError, match="--crop-px"):
        SlideReader(plain, None, "field").read_image(InputImage("f", render_field(1).image))


def test_invalid_onnx_graph_is_refused(exported_run):
    bundle = exported_run.bundle
    broken = ModelBundle(bundle.origin, {**bundle.files, "model.onnx": b"nonsense"}, bundle.signer, bundle.digest)
    with pytest.raises(BundleError, match="cannot load"):
        BundleRuntime(broken, "fp32")
    with pytest.raises(BundleError, match="has no"):
        bundle.onnx_graph("int4")


@pytest.mark.parametrize(
    "module",
    [
        "deploy.inference.runtime",
        "deploy.slide.reader",
        "deploy.inference.local_calibration",
        "pipeline.cli.commands.predict",
    ],
)
def test_edge_imports_no_torch(module):
    code = f"import sys, {module}, onnxruntime; print([m for m in ('torch', 'monai', 'onnx', 'scipy', 'cv2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
