"""Which site holds which examples, in a simulation. Real sites hold what they hold.

Validation and test examples are always dealt disjointly, so that no example is counted twice in a pooled metric.
Where the data have units (patients, slides), `iid` and `quantity` deal whole ones: a patient goes to one hospital.
Partitions by class cannot: a patient's cells are of several classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.registry import Component, suggest_names
from sites.data.base import SPLITS, Dataset

PARTITION_SEED_SALT = 0x5A17E5
MAX_DIRICHLET_DRAWS = 1000
MAX_LISTED = 10
SiteRows = list[np.ndarray]  # a site's indices each, int64


@dataclass(frozen=True)
class SitePartition:
    """One site's examples, as int64 indices into the data set in ascending order."""

    name: str
    train: Tensor
    val: Tensor
    test: Tensor
    examples_per_epoch: int | None = None  # examples that a local epoch draws, if fewer than len(train)


class Partitioner(Component):
    @abstractmethod
    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]: ...


class IidPartitioner(Partitioner):
    """Shuffled and dealt evenly: sizes differ by at most one example, or by about a unit."""

    name: Literal["iid"] = "iid"

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        shares = np.full(_require_num_sites(self, num_sites), 1.0)
        return _build_partitions(
            _site_names(len(shares)), {s: _distribute_units(data, s, shares, _split_rng(seed, s)) for s in SPLITS}
        )


class ResampledIidPartitioner(Partitioner):
    """Every site draws each local epoch afresh from all training examples, as many as an even share would be."""

    name: Literal["iid_resampled"] = "iid_resampled"

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        partitions = IidPartitioner().assign(data, _require_num_sites(self, num_sites), seed)
        train = data.rows_in_split("train")
        return [SitePartition(s.name, train, s.val, s.test, len(train) // len(partitions)) for s in partitions]


class ClassPartitioner(Partitioner):
    """Site i (from 0) holds the classes i, i+1, ..., i+per_site-1, counted modulo the number of classes.

    As in the thesis, of each class the first n_train // sites // per_site images in dataset order, the
    same for every site that holds it. `disjoint` deals all images of a class evenly over those sites instead.
    With at least as many sites as classes every class has a site; with fewer, some may have none.
    """

    name: Literal["classes"] = "classes"
    per_site: int = Field(ge=1)
    disjoint: bool = False

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        count, num_classes = _require_num_sites(self, num_sites), len(data.classes)
        if self.per_site > num_classes:
            raise IncompatibleStudyError(
                f"partition.per_site = {self.per_site}, but the data have {num_classes} classes; say at most {num_classes}"
            )
        site_has_class = np.zeros((num_classes, count))  # (C, S): 1 where the site holds the class
        for site in range(count):
            site_has_class[(site + np.arange(self.per_site)) % num_classes, site] = 1
        parts = {s: _distribute_classes(data, s, site_has_class, _split_rng(seed, s)) for s in SPLITS}
        if not self.disjoint:
            rows_of_class = _rows_by_class(data, "train")
            rows_per_class = len(_rows_in_split(data, "train")) // count // self.per_site
            parts["train"] = [
                np.concatenate([rows_of_class[c][:rows_per_class] for c in np.flatnonzero(has_class)])
                for has_class in site_has_class.T
            ]
        return _build_partitions(_site_names(count), parts)


class DirichletPartitioner(Partitioner):
    """For each class, shares of the sites drawn from Dirichlet(alpha), the same for train, val and test."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(gt=0)
    min_size: int = Field(10, ge=1)  # training examples of the smallest site; drawn again until it holds

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        count, n = _require_num_sites(self, num_sites), len(_rows_in_split(data, "train"))
        if count * self.min_size > n:
            raise IncompatibleStudyError(
                f"{count} sites of at least {self.min_size} (partition.min_size) need {count * self.min_size} training "
                f"examples, but there are {n}; say fewer sites or a smaller min_size"
            )
        rng = np.random.default_rng([seed, PARTITION_SEED_SALT])
        class_counts = np.array([len(c) for c in _rows_by_class(data, "train")])
        best_min_size = 0
        for _ in range(MAX_DIRICHLET_DRAWS):
            shares = rng.dirichlet(np.full(count, self.alpha), len(class_counts))  # (C, S)
            sizes = sum(np.diff(_cut_points(m, row), prepend=0) for m, row in zip(class_counts, shares, strict=True))
            best_min_size = max(best_min_size, int(np.min(sizes)))
            if best_min_size >= self.min_size:
                return _build_partitions(
                    _site_names(count), {s: _distribute_classes(data, s, shares, _split_rng(seed, s)) for s in SPLITS}
                )
        raise IncompatibleStudyError(
            f"in {MAX_DIRICHLET_DRAWS} draws with alpha = {self.alpha} the smallest of {count} sites had at best {best_min_size} training "
            f"examples, not {self.min_size}; say a larger partition.alpha, a smaller min_size or fewer sites"
        )


class QuantityPartitioner(Partitioner):
    """Alike in labels, unlike in number: `sizes` says each site's training examples (the rest is left out);
    `ratio` deals out everything in a geometric row in which the last site has `ratio` times the first's."""

    name: Literal["quantity"] = "quantity"
    sizes: tuple[PositiveInt, ...] | None = Field(None, min_length=1)
    ratio: float | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        if (self.sizes is None) == (self.ratio is None):
            raise ValueError("say either sizes or ratio")
        return self

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        count, train = _require_num_sites(self, num_sites), _rows_in_split(data, "train")
        if self.sizes is None:
            shares = np.geomspace(1, self.ratio or 1, count)
            return _build_partitions(
                _site_names(count), {s: _distribute_units(data, s, shares, _split_rng(seed, s)) for s in SPLITS}
            )
        if len(self.sizes) != count:
            raise IncompatibleStudyError(
                f"partition.sizes has {len(self.sizes)} numbers for {count} sites; say one for each site"
            )
        if sum(self.sizes) > len(train):
            raise IncompatibleStudyError(
                f"partition.sizes add up to {sum(self.sizes)}, but there are {len(train)} training examples; say less, or partition = 'iid'"
            )
        shares = np.array(self.sizes, float)
        parts = {s: _distribute_units(data, s, shares, _split_rng(seed, s)) for s in SPLITS}
        if data.privacy_unit is None:
            parts["train"] = np.split(_split_rng(seed, "train").permutation(train), np.cumsum(self.sizes))[:-1]
        parts["train"] = [part[:size] for part, size in zip(parts["train"], self.sizes, strict=True)]
        if too_small := [size for part, size in zip(parts["train"], self.sizes, strict=True) if len(part) < size]:
            raise IncompatibleStudyError(
                f"partition.sizes: a {data.privacy_unit} goes to one site, so {too_small[0]} training examples cannot be had from the "
                f"{len(train)} there are; say smaller sizes, or have more data"
            )
        return _build_partitions(_site_names(count), parts)


class KeyPartitioner(Partitioner):
    """One site for each name of a natural key, e.g. the hospital or the batch; `only` keeps some, in that order."""

    name: Literal["key"] = "key"
    by: str
    only: tuple[str, ...] | None = Field(None, min_length=1)

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        key = data.keys.get(self.by)
        if key is None:
            suggestion = suggest_names(self.by, data.keys) if data.keys else "these have none: choose another partition"
            raise IncompatibleStudyError(f"partition.by = {self.by!r} is no key of the data; {suggestion}")
        counts = dict(zip(key.names, torch.bincount(key.codes, minlength=len(key.names)).tolist(), strict=True))
        names = self.only or key.names
        for name in names:
            if name not in counts:
                raise IncompatibleStudyError(
                    f"partition.only: {self.by} has no {name!r}; {suggest_names(name, counts)}"
                )
        if len(set(names)) < len(names):
            raise IncompatibleStudyError("partition.only names a site twice; remove one")
        if num_sites and num_sites != len(names):
            raise IncompatibleStudyError(
                f"sites.count = {num_sites}, but {self.by} has {len(names)} names "
                f"({_format_some([f'{name}: {counts[name]}' for name in names])}); "
                "leave sites.count out, or choose some by partition.only"
            )
        codes = key.codes.numpy()
        selected_codes = [key.names.index(name) for name in names]
        return _build_partitions(
            names,
            {
                s: [split_rows[codes[split_rows] == k] for k in selected_codes]
                for s in SPLITS
                for split_rows in [_rows_in_split(data, s)]
            },
        )


def _require_num_sites(partitioner: Partitioner, num_sites: int | None) -> int:
    if not num_sites or num_sites < 1:
        raise IncompatibleStudyError(
            f"partition {partitioner.name!r} needs a number of sites; say sites.count = 10, for example"
        )
    return num_sites


def _site_names(count: int) -> list[str]:
    return [f"site-{i:0{max(2, len(str(count)))}d}" for i in range(1, count + 1)]


def _split_rng(seed: int, split: str) -> np.random.Generator:
    return np.random.default_rng([seed, PARTITION_SEED_SALT, SPLITS.index(split)])


def _rows_in_split(data: Dataset, split: str) -> np.ndarray:
    return data.rows_in_split(split).numpy()


def _rows_by_class(data: Dataset, split: str) -> SiteRows:
    rows = _rows_in_split(data, split)
    labels = data.y.numpy()[rows]
    return [rows[labels == c] for c in range(len(data.classes))]


def _cut_points(n: int, shares: np.ndarray) -> np.ndarray:
    """(S,) where n examples are cut so that site i gets its share; the last cut is n, so nothing is lost."""
    cuts: np.ndarray = np.rint(np.cumsum(shares) / shares.sum() * n).astype(np.int64)
    return cuts


def _distribute_rows(indices: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> SiteRows:
    return np.split(rng.permutation(indices), _cut_points(len(indices), shares)[:-1])


def _distribute_units(data: Dataset, split: str, shares: np.ndarray, rng: np.random.Generator) -> SiteRows:
    """Each unit to the site that still lacks most of its share; single examples where the data have no units."""
    rows = _rows_in_split(data, split)
    if data.privacy_unit is None:
        return _distribute_rows(rows, shares, rng)
    units, unit_of_row, sizes = np.unique(
        data.keys[data.privacy_unit].codes.numpy()[rows], return_inverse=True, return_counts=True
    )
    deficits = shares / shares.sum() * len(rows)
    site_of_unit = np.empty(len(units), np.int64)
    for unit in rng.permutation(len(units)):
        site_of_unit[unit] = np.argmax(deficits)
        deficits[site_of_unit[unit]] -= sizes[unit]
    return [rng.permutation(rows[site_of_unit[unit_of_row] == site]) for site in range(len(shares))]


def _distribute_classes(data: Dataset, split: str, shares: np.ndarray, rng: np.random.Generator) -> SiteRows:
    """`shares`: (C, S); a class that no site holds is left out."""
    rows_by_class = [
        _distribute_rows(c, row, rng) for c, row in zip(_rows_by_class(data, split), shares, strict=True) if row.any()
    ]
    return [np.concatenate(site) for site in zip(*rows_by_class, strict=True)]


def _format_some(items: Sequence[str]) -> str:
    return ", ".join(items[:MAX_LISTED]) + (f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else "")


def _build_partitions(names: Sequence[str], parts: Mapping[str, SiteRows]) -> list[SitePartition]:
    empty = [name for name, train in zip(names, parts["train"], strict=True) if not len(train)]
    if empty:
        raise IncompatibleStudyError(
            f"no training examples for {_format_some(empty)}; say fewer sites or another partition "
            "(with `key`: name the others in partition.only, or choose a key coarser than whom the splits keep whole)"
        )
    train, val, test = ([torch.from_numpy(np.sort(p)) for p in parts[s]] for s in SPLITS)
    return [SitePartition(*columns) for columns in zip(names, train, val, test, strict=True)]
