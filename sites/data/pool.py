"""All examples of a process in one tensor on the device, and each site's row indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SplitIndices:
    """Pool rows of one site (or of the coordinator), by split."""

    train: Tensor  # int64 indices
    val: Tensor
    test: Tensor
    examples_per_epoch: int | None = None  # examples per local epoch, if fewer than len(train)

    @property
    def num_examples(self) -> int:
        return len(self.train) if self.examples_per_epoch is None else self.examples_per_epoch


@dataclass(frozen=True)
class ExamplePool:
    """The examples of all simulated sites, or of one real site."""

    x: Tensor  # float32 in [0, 1], or uint8 if floats would need too much memory
    y: Tensor
    device: torch.device
    unit_ids: Tensor | None = None  # (N,) int64: privacy unit of each example, if known

    def inputs(self, index: Tensor) -> Tensor:
        x = self.x.index_select(0, index)
        return x if x.is_floating_point() else x.float().div_(255)

    def labels(self, index: Tensor) -> Tensor:
        return self.y.index_select(0, index)
