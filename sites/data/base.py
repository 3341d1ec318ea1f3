"""What every data source gives: examples in memory with their classes, splits, natural keys and a fingerprint."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pipeline.components import Component

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Key:
    """A natural key of the examples, e.g. patient or batch: `names[codes[i]]` is example i's."""

    codes: Tensor  # (N,) int64
    names: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    x: Tensor  # (N, C, H, W) uint8 images, or (N, F) float32 points
    y: Tensor  # (N,) int64
    classes: tuple[str, ...]
    split: Tensor  # (N,) uint8: index into SPLITS
    fingerprint: str
    keys: Mapping[str, Key] = field(default_factory=dict)
    unit: str | None = None  # the coarsest key: whom privacy protects
    skipped: tuple[str, ...] = ()  # files left out, each with its reason

    def where(self, split: str) -> Tensor:
        return torch.nonzero(self.split == SPLITS.index(split)).flatten()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])


class Source(Component):
    """A data source chosen by a study. `val` is the share of the training examples set apart for validation."""

    path: Path | None = None
    val: float = Field(0.1, ge=0, lt=1)

    @abstractmethod
    def load(self, root: Path | None, seed: int) -> Dataset:
        """`root`: where to look first, from `--data` or HEMOFED_DATA; `self.path` wins over it."""


def fingerprint(*arrays: Tensor | np.ndarray) -> str:
    digest = hashlib.sha256()
    for a in arrays:
        array = np.ascontiguousarray(a.numpy() if isinstance(a, Tensor) else a)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def carve(split: np.ndarray, share: float, seed: int, unit: np.ndarray | None = None) -> np.ndarray:
    """Moves about `share` of the training examples to `val`, in whole units where there are any."""
    if not share:
        return split
    split = split.copy()
    train = np.flatnonzero(split == 0)
    unit = np.arange(len(split)) if unit is None else unit
    units, sizes = np.unique(unit[train], return_counts=True)
    order = np.random.default_rng([seed, 0xCA]).permutation(len(units))
    reached = np.concatenate([[0], np.cumsum(sizes[order])])  # examples in no unit, in the first, the first two, ...
    enough = int(np.abs(reached - share * len(train)).argmin())
    split[train[np.isin(unit[train], units[order[:enough]])]] = 1
    return split
