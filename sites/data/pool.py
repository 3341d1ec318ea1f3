"""The examples of all sites that one process trains, once on the device, and each site's rows of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SplitIndices:
    """One site's (or the coordinator's) rows of the pool, by split."""

    train: Tensor  # int64 indices
    val: Tensor
    test: Tensor
    examples_per_epoch: int | None = None  # examples that a local epoch draws, if fewer than len(train)

    @property
    def num_examples(self) -> int:
        return len(self.train) if self.examples_per_epoch is None else self.examples_per_epoch


@dataclass(frozen=True)
class ExamplePool:
    """The examples of all simulated sites (or of one real one), once, on the device."""

    x: Tensor  # float32 in [0, 1], or uint8 where float would not fit
    y: Tensor
    device: torch.device
    unit_ids: Tensor | None = None  # (N,) int64: whose example it is, where the data know

    def inputs(self, index: Tensor) -> Tensor:
        x = self.x.index_select(0, index)
        return x if x.is_floating_point() else x.float().div_(255)

    def labels(self, index: Tensor) -> Tensor:
        return self.y.index_select(0, index)
