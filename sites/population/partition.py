"""Partitions: which simulated site holds which examples. Real sites use all their examples.

Validation and test examples are always distributed disjointly, so that a pooled metric counts no example twice.
If the data have privacy units (patients, slides), `iid` and `quantity` keep each unit at one site. Partitions by class
cannot: one patient has cells of several classes.
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
MAX_LISTED = 10  # sites that an error message names
SiteRows = list[np.ndarray]  # int64 indices into the data set, one array per site


@dataclass(frozen=True)
class SitePartition:
    """One site's examples, as int64 indices into the data set in ascending order."""

    name: str
    train: Tensor
    val: Tensor
    test: Tensor
    examples_per_epoch: int | None = None  # examples per local epoch, if fewer than len(train)


class Partitioner(Component):
    @abstractmethod
    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        """One partition per site. `num_sites`: the study's sites.count, if given; `seed`: the study's."""


class IidPartitioner(Partitioner):
    """Shuffled and distributed evenly: sizes differ by at most one example, or by about one privacy unit."""

    name: Literal["iid"] = "iid"

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        shares = np.full(_require_num_sites(self, num_sites), 1.0)
        return _build_partitions(
            _site_names(len(shares)), {s: _distribute_units(data, s, shares, _split_rng(seed, s)) for s in SPLITS}
        )


class ResampledIidPartitioner(Partitioner):
    """Every site samples each local epoch from all training examples, as many as an even share has."""

    name: Literal["iid_resampled"] = "iid_resampled"

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        partitions = IidPartitioner().assign(data, _require_num_sites(self, num_sites), seed)
        train = data.rows_in_split("train")
        return [SitePartition(s.name, train, s.val, s.test, len(train) // len(partitions)) for s in partitions]


class ClassPartitioner(Partitioner):
    """Site i (from 0) holds the classes i, i+1, ..., i+per_site-1, modulo the number of classes.

    As in the thesis, all sites with a class hold the same images of it: the first n_train // sites // per_site in
    dataset order. `disjoint` instead distributes all images of a class evenly over these sites. With fewer sites than
    classes, some classes may have no site.
    """

    name: Literal["classes"] = "classes"
    per_site: int = Field(ge=1)
    disjoint: bool = False

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        count, num_classes = _require_num_sites(self, num_sites), len(data.classes)
        if self.per_site > num_classes:
            raise IncompatibleStudyError(
                f"partition.per_site = {self.per_site}, but the data have {num_classes} classes; "
                f"set at most {num_classes}"
            )
        site_has_class = np.zeros((num_classes, count))  # (C, S): 1 if the site holds the class
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
    """For each class, the sites' shares are sampled from Dirichlet(alpha) and apply to train, val and test."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(gt=0)
    min_size: int = Field(10, ge=1)  # training examples of the smallest site; shares are resampled until they suffice

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        count, n = _require_num_sites(self, num_sites), len(_rows_in_split(data, "train"))
        if count * self.min_size > n:
            raise IncompatibleStudyError(
                f"{count} sites of at least {self.min_size} (partition.min_size) need {count * self.min_size} training "
                f"examples, but there are {n}; set fewer sites or a smaller min_size"
            )
        rng = np.random.default_rng([seed, PARTITION_SEED_SALT])
        class_counts = np.array([len(c) for c in _rows_by_class(data, "train")])
        best_min_size = 0
        for _ in range(MAX_DIRICHLET_DRAWS):
            shares = rng.dirichlet(np.full(count, self.alpha), len(class_counts))  # (C, S)
            sizes = sum(np.diff(_share_ends(m, row), prepend=0) for m, row in zip(class_counts, shares, strict=True))
            best_min_size = max(best_min_size, int(np.min(sizes)))
            if best_min_size >= self.min_size:
                return _build_partitions(
                    _site_names(count), {s: _distribute_classes(data, s, shares, _split_rng(seed, s)) for s in SPLITS}
                )
        raise IncompatibleStudyError(
            f"in {MAX_DIRICHLET_DRAWS} draws with alpha = {self.alpha} the smallest of {count} sites had at most "
            f"{best_min_size} training examples, not {self.min_size}; set a larger partition.alpha, a smaller min_size "
            "or fewer sites"
        )


class QuantityPartitioner(Partitioner):
    """Sites with similar labels and different sizes.

    `sizes`: training examples of each site; the remaining examples are unused. `ratio`: all examples are distributed in
    a geometric progression, and the last site has `ratio` times as many as the first.
    """

    name: Literal["quantity"] = "quantity"
    sizes: tuple[PositiveInt, ...] | None = Field(None, min_length=1)
    ratio: float | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        if (self.sizes is None) == (self.ratio is None):
            raise ValueError("give either sizes or ratio")
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
                f"partition.sizes has {len(self.sizes)} numbers for {count} sites; give one for each site"
            )
        if sum(self.sizes) > len(train):
            raise IncompatibleStudyError(
                f"partition.sizes add up to {sum(self.sizes)}, but there are {len(train)} training examples; set "
                "smaller sizes, or partition = 'iid'"
            )
        shares = np.array(self.sizes, float)
        parts = {s: _distribute_units(data, s, shares, _split_rng(seed, s)) for s in SPLITS}
        if data.privacy_unit is None:
            parts["train"] = np.split(_split_rng(seed, "train").permutation(train), np.cumsum(self.sizes))[:-1]
        parts["train"] = [part[:size] for part, size in zip(parts["train"], self.sizes, strict=True)]
        if too_small := [size for part, size in zip(parts["train"], self.sizes, strict=True) if len(part) < size]:
            raise IncompatibleStudyError(
                f"partition.sizes: a {data.privacy_unit} belongs to one site, so a site cannot get {too_small[0]} of "
                f"the {len(train)} training examples; set smaller sizes, or provide more data"
            )
        return _build_partitions(_site_names(count), parts)


class KeyPartitioner(Partitioner):
    """One site for each value of a natural key, e.g. hospital or batch. `only`: these values, in this order."""

    name: Literal["key"] = "key"
    by: str
    only: tuple[str, ...] | None = Field(None, min_length=1)

    def assign(self, data: Dataset, num_sites: int | None, seed: int) -> list[SitePartition]:
        key = data.keys.get(self.by)
        if key is None:
            suggestion = suggest_names(self.by, data.keys) if data.keys else "it has no keys: choose another partition"
            raise IncompatibleStudyError(f"partition.by = {self.by!r} is not a key of this data; {suggestion}")
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
                f"sites.count = {num_sites}, but {self.by} has {len(names)} values "
                f"({_format_some([f'{name}: {counts[name]}' for name in names])}); "
                "omit sites.count, or select some with partition.only"
            )
        codes = key.codes.numpy()
        selected_codes = [key.names.index(name) for name in names]
        rows_by_split = {s: _rows_in_split(data, s) for s in SPLITS}
        return _build_partitions(
            names, {s: [rows[codes[rows] == code] for code in selected_codes] for s, rows in rows_by_split.items()}
        )


def _require_num_sites(partitioner: Partitioner, num_sites: int | None) -> int:
    if not num_sites or num_sites < 1:
        raise IncompatibleStudyError(
            f"partition {partitioner.name!r} needs a number of sites; set sites.count = 10, for example"
        )
    return num_sites


def _site_names(count: int) -> list[str]:
    return [f"site-{i:0{max(2, len(str(count)))}d}" for i in range(1, count + 1)]


def _split_rng(seed: int, split: str) -> np.random.Generator:
    return np.random.default_rng([seed, PARTITION_SEED_SALT, SPLITS.index(split)])


def _rows_in_split(data: Dataset, split: str) -> np.ndarray:
    return data.rows_in_split(split).numpy()


def _rows_by_class(data: Dataset, split: str) -> list[np.ndarray]:
    rows = _rows_in_split(data, split)
    labels = data.y.numpy()[rows]
    return [rows[labels == c] for c in range(len(data.classes))]


def _share_ends(n: int, shares: np.ndarray) -> np.ndarray:
    """(S,): the end of each site's share of n examples. The last one is n, so no example is lost."""
    ends: np.ndarray = np.rint(np.cumsum(shares) / shares.sum() * n).astype(np.int64)
    return ends


def _distribute_rows(indices: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> SiteRows:
    return np.split(rng.permutation(indices), _share_ends(len(indices), shares)[:-1])


def _distribute_units(data: Dataset, split: str, shares: np.ndarray, rng: np.random.Generator) -> SiteRows:
    """Assigns each unit, in random order, to the site that lacks most of its share; without units, single examples."""
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
    """`shares` (C, S): the sites' shares of each class; a class that no site holds is left out."""
    rows_by_class_and_site = [
        _distribute_rows(rows, class_shares, rng)
        for rows, class_shares in zip(_rows_by_class(data, split), shares, strict=True)
        if class_shares.any()
    ]
    return [np.concatenate(rows_by_class) for rows_by_class in zip(*rows_by_class_and_site, strict=True)]


def _format_some(items: Sequence[str]) -> str:
    return ", ".join(items[:MAX_LISTED]) + (f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else "")


def _build_partitions(names: Sequence[str], parts: Mapping[str, SiteRows]) -> list[SitePartition]:
    empty = [name for name, train in zip(names, parts["train"], strict=True) if not len(train)]
    if empty:
        raise IncompatibleStudyError(
            f"no training examples for {_format_some(empty)}; set fewer sites or another partition "
            "(with `key`: list the non-empty sites in partition.only, or choose a key coarser than the splits' unit)"
        )
    train, val, test = ([torch.from_numpy(np.sort(p)) for p in parts[s]] for s in SPLITS)
    return [SitePartition(*columns) for columns in zip(names, train, val, test, strict=True)]
