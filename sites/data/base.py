"""What every data source gives: examples in memory with their classes, splits, natural keys and a fingerprint."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pipeline.core.registry import Component

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

    # of what a bedside machine has to do with a whole field: how large a red cell is there, how much is cut about each,
    # and how that is made smaller; None: single images only
    cell_pixels: ClassVar[float | None] = None
    resize: ClassVar[Literal["area", "triangle"]] = "triangle"

    @property
    def window_pixels(self) -> float | None:
        return None

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


def carve(split: np.ndarray, share: float, seed: int, unit: np.ndarray | None = None, into: str = "val") -> np.ndarray:
    """Moves about `share` of the training examples to `into`, in whole units where there are any."""
    split = split.copy()
    split[carved(split == SPLITS.index("train"), share, [seed, 0xCA], unit)] = SPLITS.index(into)
    return split


def carved(among: np.ndarray, share: float, seed: Sequence[int], unit: np.ndarray | None = None) -> np.ndarray:
    """Rows, ascending: as near to the share of those `among` as whole units come."""
    rows = np.flatnonzero(among)
    owner = rows if unit is None else unit[rows]
    units, sizes = np.unique(owner, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(units))
    reached = np.concatenate([[0], np.cumsum(sizes[order])])  # examples in no unit, in the first, the first two, ...
    enough = int(np.abs(reached - share * len(rows)).argmin())
    return rows[np.isin(owner, units[order[:enough]])]
