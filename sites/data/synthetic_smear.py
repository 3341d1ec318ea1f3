"""Blood cells rendered by sites/smear: made-up patients, each with a disease, a stain and several fields of view.

The embedded default source: it needs no download, and neither colour nor size alone tells a schistocyte.
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

from pipeline.core.errors import Refused
from sites.data.base import SPLITS, Dataset, Key, Source, carve, fingerprint
from sites.data.renderer.cell_outlines import TYPES

if TYPE_CHECKING:
    from sites.data.renderer.sampling_plan import Sitting


class SyntheticSmear(Source):
    """`cells` in all, of which the share `schistocytes` are such; whole patients go to test and val."""

    name: Literal["synthetic_smear"] = "synthetic_smear"
    cell_pixels: ClassVar[float | None] = 41.0  # the median longest side in Chula's fields
    resize: ClassVar[Literal["area", "triangle"]] = "area"
    cells: int = Field(4000, ge=1)
    size: int = Field(72, ge=24, le=96)
    task: Literal["schistocyte", "types"] = "schistocyte"
    schistocytes: float = Field(0.15, ge=0, le=1)
    patients: int = Field(40, ge=1)
    test: float = Field(0.25, ge=0, lt=1)
    val: float = Field(0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.cells < self.patients:
            raise ValueError(f"{self.cells} cells are too few for {self.patients} patients; lower patients")
        return self

    @property
    def window_pixels(self) -> float | None:
        return 72.0  # sites/data/renderer/field.py cuts so much

    def load(self, root: Path | None, seed: int) -> Dataset:
        return _rendered(self, seed)

    def render(self, seed: int) -> Dataset:
        from sites.data.renderer.field import crops, render_field  # they need OpenCV
        from sites.data.renderer.sampling_plan import plan

        def cells_of(sitting: Sitting) -> np.ndarray:
            rng = np.random.default_rng(sitting.seed)
            return crops(render_field(rng, sitting.who, sitting.types, sitting.others), self.size)

        sittings = plan(self.cells, self.patients, self.schistocytes, seed)
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            images = np.concatenate(list(pool.map(cells_of, sittings)))
        x = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
        counts = [len(s.types) for s in sittings]
        kind = np.concatenate([s.types for s in sittings]).astype(np.int64)
        patient = np.repeat([s.patient for s in sittings], counts)
        split = carve(np.zeros(self.cells, np.uint8), self.test, seed, patient, into="test")
        if self.test and not (split == SPLITS.index("test")).any():
            raise Refused(
                "no whole patient was small enough for data.test, so nothing could be judged; have more patients"
            )
        split = carve(split, self.val, seed, patient)
        schistocyte = torch.from_numpy((kind == TYPES.index("schistocyte")).astype(np.int64))
        y = torch.from_numpy(kind) if self.task == "types" else schistocyte
        classes = TYPES if self.task == "types" else ("other", "schistocyte")
        keys = {
            "patient": _key(patient, [f"patient {p}" for p in range(self.patients)]),
            "field": _key(np.repeat(np.arange(len(sittings)), counts), [f"field {f}" for f in range(len(sittings))]),
            "type": _key(kind, TYPES),
        }
        return Dataset(x, y, classes, torch.from_numpy(split), fingerprint(x, y, split), keys, "patient")


@lru_cache(maxsize=2)  # a run and its yardsticks, or a study's data and its public data, need them again
def _rendered(source: SyntheticSmear, seed: int) -> Dataset:
    return source.render(seed)


def _key(codes: np.ndarray, names: list[str] | tuple[str, ...]) -> Key:
    return Key(torch.from_numpy(codes.astype(np.int64)), tuple(names))
