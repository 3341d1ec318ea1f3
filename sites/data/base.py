"""Data sources return a `Dataset`: examples in memory with classes, splits, natural keys and a fingerprint."""

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
class GroupKey:
    """A natural key of the examples, e.g. patient or batch: `names[codes[i]]` is that of example i."""

    codes: Tensor  # (N,) int64
    names: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    x: Tensor  # (N, C, H, W) uint8 images, or (N, F) float32 points
    y: Tensor  # (N,) int64
    classes: tuple[str, ...]
    split: Tensor  # (N,) uint8: index into SPLITS
    fingerprint: str
    keys: Mapping[str, GroupKey] = field(default_factory=dict)
    privacy_unit: str | None = None  # the key whose values differential privacy protects, e.g. patient
    skipped: tuple[str, ...] = ()  # files left out, each with its reason

    def rows_in_split(self, split: str) -> Tensor:
        return torch.nonzero(self.split == SPLITS.index(split)).flatten()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])


class DataSource(Component):
    """A data source chosen by a study. `val`: fraction of the training examples used for validation."""

    path: Path | None = None
    val: float = Field(0.1, ge=0, lt=1)

    # For inference on whole fields: the longest side of a red cell in pixels (None: single images only), and how a crop
    # is resized.
    cell_pixels: ClassVar[float | None] = None
    resize_filter: ClassVar[Literal["area", "triangle"]] = "triangle"

    @property
    def window_pixels(self) -> float | None:
        """Side of the crop around each cell of a field; None: single images only."""
        return None

    @abstractmethod
    def load(self, root: Path | None, seed: int) -> Dataset:
        """`root`: the folder given by `--data` or HEMOFED_DATA; `self.path` takes precedence."""


def fingerprint(*arrays: Tensor | np.ndarray) -> str:
    """SHA-256 of types, shapes and values."""
    digest = hashlib.sha256()
    for a in arrays:
        array = np.ascontiguousarray(a.numpy() if isinstance(a, Tensor) else a)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def assign_split(
    split: np.ndarray, fraction: float, seed: int, unit_ids: np.ndarray | None = None, target_split: str = "val"
) -> np.ndarray:
    """Moves about `fraction` of the training examples to `target_split`, in whole units if `unit_ids` is given."""
    split = split.copy()
    split[sample_whole_units(split == SPLITS.index("train"), fraction, [seed, 0xCA], unit_ids)] = SPLITS.index(
        target_split
    )
    return split


def sample_whole_units(
    candidates: np.ndarray, fraction: float, seed: Sequence[int], unit_ids: np.ndarray | None = None
) -> np.ndarray:
    """Rows in ascending order: whole units whose size is as close as possible to `fraction` of the candidates."""
    rows = np.flatnonzero(candidates)
    row_units = rows if unit_ids is None else unit_ids[rows]
    units, sizes = np.unique(row_units, return_counts=True)
    unit_order = np.random.default_rng(seed).permutation(len(units))
    cumulative_sizes = np.concatenate([[0], np.cumsum(sizes[unit_order])])  # of no unit, the first, the first two, ...
    num_units = int(np.abs(cumulative_sizes - fraction * len(rows)).argmin())
    return rows[np.isin(row_units, units[unit_order[:num_units]])]
