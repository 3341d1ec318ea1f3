"""Labelled cells as both readers of `smear_cells` return them, before a study selects some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from sites.data.base import GroupKey

# Chula-RBC-12's codes 0..12 in its current order; an old revision of its page has 9 = sickle, 10 = schistocyte
CHULA_TYPES = (
    "normal", "macrocyte", "microcyte", "spherocyte", "target", "stomatocyte", "ovalocyte", "teardrop", "burr",
    "schistocyte", "uncategorised", "hypochromia", "elliptocyte",
)  # fmt: skip
PixelDecoder = Callable[[np.ndarray], np.ndarray]  # (n,) rows -> (n, 3, size, size) uint8; decodes only these
UNCATEGORISED = "uncategorised"  # mostly two overlapping cells


@dataclass(frozen=True)
class KeyColumn:
    """A natural key: integers, displayed as `names[value]`, or as `batch-3` without names."""

    values: np.ndarray  # (N,) int64
    names: tuple[str, ...] | None = None

    def to_group_key(self, name: str, rows: np.ndarray) -> GroupKey:
        distinct, codes = np.unique(self.values[rows], return_inverse=True)
        names = tuple(self.names[v] if self.names else f"{name}-{v}" for v in distinct)
        return GroupKey(torch.from_numpy(codes.astype(np.int64)), names)


@dataclass(frozen=True)
class CellRecords:
    origin: str  # name of the file or folder
    cell_type: KeyColumn  # always with names
    keys: Mapping[str, KeyColumn]  # always with `field` and `unit`
    unit: str
    is_repeat: np.ndarray  # (N,) bool: the same physical cell in an earlier, overlapping field
    decode_pixels: PixelDecoder
    fold: np.ndarray | None = None  # (N,) int64; every unit is in one fold
    batches: tuple[int, ...] = ()  # the batches that a study may select
    skipped: tuple[str, ...] = ()

    @property
    def type_names(self) -> tuple[str, ...]:
        return self.cell_type.names or ()


def values_in_several(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """The values of `inner` that occur with more than one value of `outer`, e.g. groups in two folds."""
    values, codes = np.unique(inner, return_inverse=True)
    pairs = np.unique(np.stack([codes, np.unique(outer, return_inverse=True)[1]]), axis=1)
    return values[np.bincount(pairs[0]) > 1]
