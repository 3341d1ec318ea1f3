import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.metrics import roc_auc_score

from sites.data.base import Dataset
from sites.data.renderer.cell_outlines import CELL_TYPES, sample_outline
from sites.data.renderer.field import FIELD_HEIGHT, FIELD_WIDTH, RenderedField, crop_rendered_cells, render_field
from sites.data.renderer.sampling_plan import apportion_total, plan_fields
from sites.data.synthetic_smear import SyntheticSmear
from tests.support.markers import REAL_CELLS, needs_real_cells

SCHISTOCYTE = CELL_TYPES.index("schistocyte")


@pytest.fixture(scope="module")
def smear() -> Dataset:
    return SyntheticSmear(cells=1500, patients=24, schistocytes=0.3, size=72).load(None, 7)


@pytest.fixture(scope="module")
def field() -> RenderedField:
    return render_field(5, types=[k for k in range(len(CELL_TYPES)) for _ in range(6)])


def test_synthetic_smear_counts_fractions_and_types(smear: Dataset) -> None:
    assert smear.x.shape == (1500, 3, 72, 72)
    assert smear.x.dtype == torch.uint8
    assert smear.classes == ("other", "schistocyte")
    assert torch.bincount(smear.y).tolist() == [1050, 450]
    cell_type = smear.keys["type"]
    assert cell_type.names == CELL_TYPES
    assert torch.equal(cell_type.codes == SCHISTOCYTE, smear.y == 1)
    assert len(cell_type.codes.unique()) == len(CELL_TYPES)


@pytest.mark.parametrize(("cells", "patients"), [(1, 1), (7, 3), (50, 50), (131, 2)])
def test_plan_fields_any_number_of_cells_and_patients(cells: int, patients: int) -> None:
    field_plans = plan_fields(cells, patients, 0.15, 0)
    assert sum(len(plan.types) for plan in field_plans) == cells
    assert {plan.patient_index for plan in field_plans} == set(range(patients))
    assert sum((plan.types == SCHISTOCYTE).sum() for plan in field_plans) == round(0.15 * cells)


def test_plan_fields_several_fields_a_patient(smear: Dataset) -> None:
    field_plans = plan_fields(4000, 40, 0.15, 0)
    assert min(np.bincount([plan.patient_index for plan in field_plans])) >= 2
    assert smear.keys["field"].codes.max() + 1 == len(smear.keys["field"].names) >= 24


def test_apportion_total_is_exact_and_bounded() -> None:
    assert apportion_total(6, np.array([1.0, 1.0, 4.0]), np.array([6, 6, 6])).tolist() == [1, 1, 4]
    assert apportion_total(10, np.array([1.0, 9.0]), np.array([10, 5])).tolist() == [5, 5]
    assert apportion_total(0, np.array([1.0, 2.0]), np.array([3, 3])).tolist() == [0, 0]
    assert apportion_total(6, np.array([1.0, 2.0]), np.array([3, 3])).tolist() == [3, 3]


def test_synthetic_smear_patients_stay_in_one_split(smear: Dataset) -> None:
    patient = smear.keys["patient"].codes
    assert smear.privacy_unit == "patient"
    assert all(len(smear.split[patient == p].unique()) == 1 for p in range(24))
    fractions = [len(smear.rows_in_split(s)) / 1500 for s in ("train", "val", "test")]
    assert fractions == pytest.approx([0.667, 0.083, 0.25], abs=0.01)


def test_synthetic_smear_follows_the_seed() -> None:
    source = SyntheticSmear(cells=60, patients=3, size=24)
    one, same, other = source.load(None, 1), source.load(None, 1), source.load(None, 2)
    assert torch.equal(one.x, same.x)
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_synthetic_smear_same_in_another_process_and_imports_the_renderer_late() -> None:
    code = (
        "import sys; from sites.data.synthetic_smear import SyntheticSmear; "
        "print(sorted({'cv2', 'albumentations', 'sklearn', 'scipy'} & set(sys.modules))); "
        "import cv2; cv2.setNumThreads(1); "
        "print(SyntheticSmear(cells=60, patients=3, size=24).load(None, 1).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.split() == ["[]", SyntheticSmear(cells=60, patients=3, size=24).load(None, 1).fingerprint]


def test_synthetic_smear_types_task_and_size() -> None:
    data = SyntheticSmear(cells=80, patients=4, size=40, task="types", schistocytes=0.1).load(None, 0)
    assert data.x.shape == (80, 3, 40, 40)
    assert data.classes == CELL_TYPES
    assert torch.equal(data.y, data.keys["type"].codes)
    assert (data.y == SCHISTOCYTE).sum() == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"cells": 0},
        {"size": 23},
        {"size": 97},
        {"task": "wbc"},
        {"schistocytes": 1.1},
        {"patients": 0},
        {"test": 1},
        {"cells": 10, "patients": 11},
        {"cell": 5},
    ],
)
def test_synthetic_smear_settings_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SyntheticSmear.model_validate(wrong)


def test_render_field_shapes_points_and_boxes(field: RenderedField) -> None:
    assert field.image.shape == (FIELD_HEIGHT, FIELD_WIDTH, 3)
    assert field.image.dtype == np.uint8
    assert ((field.points >= 0) & (field.points < (FIELD_WIDTH, FIELD_HEIGHT))).all()
    assert len(field.points) == len(field.types) == len(field.boxes) == len(field.outlines) == 72
    middle = (field.boxes[:, :2] + field.boxes[:, 2:]) / 2
    assert 2 < np.hypot(*(field.points - middle).T).mean() < 5  # annotators click some pixels off the centre


def test_render_field_some_cells_overlap(field: RenderedField) -> None:
    inside = [
        cv2.pointPolygonTest(a.astype(np.float32), (float(x), float(y)), False) > 0
        for i, a in enumerate(field.outlines)
        for j, b in enumerate(field.outlines)
        if i != j
        for x, y in b[::8]
    ]
    assert 0.0001 < np.mean(inside) < 0.02


def test_crop_rendered_cells_centers_a_cell(field: RenderedField) -> None:
    """Inside an outline, the image is darker than the empty glass around it."""
    covered = np.zeros((FIELD_HEIGHT, FIELD_WIDTH), np.uint8)
    for shape in field.outlines:
        cv2.fillPoly(covered, [np.round(shape).astype(np.int32)], 1)
    empty = cv2.dilate(covered, np.ones((9, 9), np.uint8)) == 0
    glass = np.percentile(field.image[..., 1][empty], 30)
    for cell, cell_type in zip(crop_rendered_cells(field), field.types, strict=True):
        assert np.percentile(cell[18:54, 18:54, 1], 15) < glass, CELL_TYPES[cell_type]


def test_schistocyte_outlines_are_less_convex() -> None:
    def solidity(cell_type: str) -> float:
        rng = np.random.default_rng(0)
        shapes = [(sample_outline(cell_type, rng) * 1000).astype(np.int32) for _ in range(60)]
        return float(np.mean([cv2.contourArea(s) / cv2.contourArea(cv2.convexHull(s)) for s in shapes]))

    assert solidity("schistocyte") + 0.04 < min(map(solidity, ("normal", "spherocyte", "target", "ovalocyte")))


def cell_statistics(images: np.ndarray) -> dict[str, np.ndarray]:
    """(n, 72, 72, 3) -> name -> (n,), one number per cell"""
    green = [cell[..., 1] for cell in images]
    level = [(np.percentile(g, 5) + np.percentile(g, 95)) / 2 for g in green]
    return {
        **{f"mean {c}": images[..., i].mean((1, 2)) for i, c in enumerate("RGB")},
        **{f"spread {c}": images[..., i].std((1, 2)) for i, c in enumerate("RGB")},
        "area": np.array([(g < at).sum() for g, at in zip(green, level, strict=True)]),
        "middle": np.array([g[24:48, 24:48].mean() for g in green]),
        "sharpness": np.array([cv2.Laplacian(g, cv2.CV_32F).var() for g in green]),
    }


def test_synthetic_smear_no_single_statistic_separates_schistocytes(smear: Dataset) -> None:
    images = smear.x.numpy().transpose(0, 2, 3, 1)
    for name, values in cell_statistics(images).items():
        auroc = roc_auc_score(smear.y.numpy(), values)
        assert max(auroc, 1 - auroc) < 0.75, name


@needs_real_cells
def test_synthetic_smear_statistics_overlap_with_real_cells(smear: Dataset) -> None:
    with np.load(REAL_CELLS / "chula_rbc12.npz") as data:
        jpeg, offset, fold, batch = (data[k] for k in ("jpeg", "offset", "fold", "batch"))
    rows = np.random.default_rng(0).permutation(np.flatnonzero((fold > 0) & (batch < 4)))[:800]
    real = np.stack([cv2.imdecode(jpeg[offset[i] : offset[i + 1]], cv2.IMREAD_COLOR)[..., ::-1] for i in rows])
    ours = smear.x.numpy().transpose(0, 2, 3, 1)[::2]
    for name, values in cell_statistics(np.concatenate([real, ours])).items():
        auroc = roc_auc_score(np.arange(len(values)) >= len(real), values)
        assert 0.2 < auroc < 0.8, name
