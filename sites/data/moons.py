"""Two interleaved half circles (scikit-learn's make_moons), a toy problem in two dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from sites.data.base import SPLITS, Dataset, DataSource, assign_split, fingerprint


class TwoMoons(DataSource):
    """`points`: total number; `test`: fraction of them. The feature skew `plane` shifts and rotates them per site."""

    name: Literal["moons"] = "moons"
    points: int = Field(840, ge=10)
    noise: float = Field(0.1, ge=0)
    test: float = Field(0.2, ge=0, lt=1)
    val: float = Field(0.0, ge=0, lt=1)

    def load(self, root: Path | None, seed: int) -> Dataset:
        from sklearn.datasets import make_moons  # takes a second to import

        random_state = int(np.random.default_rng([seed, 0x3005]).integers(2**32))
        points, labels = make_moons(self.points, noise=self.noise or None, random_state=random_state)
        split = np.zeros(self.points, np.uint8)
        split[self.points - round(self.test * self.points) :] = SPLITS.index("test")  # make_moons shuffles
        split = assign_split(split, self.val, seed)
        x, y = torch.from_numpy(points.astype(np.float32)), torch.from_numpy(labels.astype(np.int64))
        return Dataset(x, y, ("upper", "lower"), torch.from_numpy(split), fingerprint(x, y, split))
