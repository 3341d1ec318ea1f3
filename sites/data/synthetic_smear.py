"""Blood cells rendered by sites/data/renderer: simulated patients, each with a disease, a stain and several fields.

The default source: it needs no download, and neither colour nor size alone separates schistocytes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from pipeline.core.errors import IncompatibleStudyError
from sites.data.base import SPLITS, Dataset, DataSource, GroupKey, assign_split, fingerprint
from sites.data.renderer.cell_outlines import CELL_TYPES

if TYPE_CHECKING:
    from sites.data.renderer.sampling_plan import FieldPlan


class SyntheticSmear(DataSource):
    """`cells`: total number; `schistocytes`: their fraction. A patient's cells are all in one split."""

    name: Literal["synthetic_smear"] = "synthetic_smear"
    cell_pixels: ClassVar[float | None] = 41.0  # median in Chula's fields
    resize_filter: ClassVar[Literal["area", "triangle"]] = "area"
    cells: int = Field(4000, ge=1)
    size: int = Field(72, ge=24, le=96)
    task: Literal["schistocyte", "types"] = "schistocyte"
    schistocytes: float = Field(0.15, ge=0, le=1)
    patients: int = Field(40, ge=1)
    test: float = Field(0.25, ge=0, lt=1)
    val: float = Field(0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.cells < self.patients:
            raise ValueError(f"{self.cells} cells are too few for {self.patients} patients; reduce patients")
        return self

    @property
    def window_pixels(self) -> float | None:
        return 72.0  # CROP_PIXELS of sites/data/renderer/field.py

    def load(self, root: Path | None, seed: int) -> Dataset:
        return _render_cached(self, seed)

    def render_dataset(self, seed: int) -> Dataset:
        from sites.data.renderer.field import crop_rendered_cells, render_field  # imports OpenCV
        from sites.data.renderer.sampling_plan import plan_fields

        def render_cells(field_plan: FieldPlan) -> np.ndarray:
            rng = np.random.default_rng(field_plan.seed)
            return crop_rendered_cells(
                render_field(rng, field_plan.profile, field_plan.types, field_plan.num_unlabeled), self.size
            )

        field_plans = plan_fields(self.cells, self.patients, self.schistocytes, seed)
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            images = np.concatenate(list(pool.map(render_cells, field_plans)))
        x = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        counts = [len(plan.types) for plan in field_plans]
        cell_types = np.concatenate([plan.types for plan in field_plans]).astype(np.int64)
        patient_ids = np.repeat([plan.patient_index for plan in field_plans], counts)
        split = assign_split(np.zeros(self.cells, np.uint8), self.test, seed, patient_ids, target_split="test")
        if self.test and not (split == SPLITS.index("test")).any():
            raise IncompatibleStudyError(
                "no patient has few enough cells for data.test, so there is no test split; increase data.patients"
            )
        split = assign_split(split, self.val, seed, patient_ids)
        is_schistocyte = torch.from_numpy((cell_types == CELL_TYPES.index("schistocyte")).astype(np.int64))
        y = torch.from_numpy(cell_types) if self.task == "types" else is_schistocyte
        classes = CELL_TYPES if self.task == "types" else ("other", "schistocyte")
        keys = {
            "patient": _group_key(patient_ids, [f"patient {p}" for p in range(self.patients)]),
            "field": _group_key(
                np.repeat(np.arange(len(field_plans)), counts), [f"field {f}" for f in range(len(field_plans))]
            ),
            "type": _group_key(cell_types, CELL_TYPES),
        }
        return Dataset(
            x=x,
            y=y,
            classes=classes,
            split=torch.from_numpy(split),
            fingerprint=fingerprint(x, y, split),
            keys=keys,
            privacy_unit="patient",
        )


@lru_cache(maxsize=2)  # reused by a run's baselines, and by a study whose public data are the same
def _render_cached(source: SyntheticSmear, seed: int) -> Dataset:
    return source.render_dataset(seed)


def _group_key(codes: np.ndarray, names: list[str] | tuple[str, ...]) -> GroupKey:
    return GroupKey(torch.from_numpy(codes.astype(np.int64)), tuple(names))
