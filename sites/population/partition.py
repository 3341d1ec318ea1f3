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

from pipeline.core.errors import Refused
from pipeline.core.registry import Component, near
from sites.data.base import SPLITS, Dataset

SALT = 0x5A17E5
DRAWS = 1000
SHOWN = 10
Parts = list[np.ndarray]  # a site's indices each, int64


@dataclass(frozen=True)
class Shard:
    """One site's examples, as int64 indices into the data set in ascending order."""

    name: str
    train: Tensor
    val: Tensor
    test: Tensor
    epoch: int | None = None  # examples that a local epoch draws, if fewer than len(train)


class Partition(Component):
    @abstractmethod
    def assign(self, data: Dataset, sites: int | None, seed: int) -> list[Shard]: ...


class Iid(Partition):
    """Shuffled and dealt evenly: sizes differ by at most one example, or by about a unit."""

    name: Literal["iid"] = "iid"

    def assign(self, data: Dataset, sites: int | None, seed: int) -> list[Shard]:
        shares = np.full(_count(self, sites), 1.0)
        return _shards(_names(len(shares)), {s: _deal_units(data, s, shares, _rng(seed, s)) for s in SPLITS})


class IidResampled(Partition):
    """Every site draws each local epoch afresh from all training examples, as many as an even share would be."""

    name: Literal["iid_resampled"] = "iid_resampled"

    def assign(self, data: Dataset, sites: int | None, seed: int) -> list[Shard]:
        dealt = Iid().assign(data, _count(self, sites), seed)
        train = data.where("train")
        return [Shard(s.name, train, s.val, s.test, len(train) // len(dealt)) for s in dealt]


class Classes(Partition):
    """Site i (from 0) holds the classes i, i+1, ..., i+per_site-1, counted modulo the number of classes.

    As in the thesis, of each class the first n_train // sites // per_site images in dataset order, the
    same for every site that holds it. `disjoint` deals all images of a class evenly over those sites instead.
    With at least as many sites as classes every class has a site; with fewer, some may have none.
    """

    name: Literal["classes"] = "classes"
    per_site: int = Field(ge=1)
    disjoint: bool = False

    def assign(self, data: Dataset, sites: int | None, seed: int) -> list[Shard]:
        count, kinds = _count(self, sites), len(data.classes)
        if self.per_site > kinds:
            raise Refused(
                f"partition.per_site = {self.per_site}, but the data have {kinds} classes; say at most {kinds}"
            )
        holds = np.zeros((kinds, count))  # (C, S): 1 where the site holds the class
        for site in range(count):
            holds[(site + np.arange(self.per_site)) % kinds, site] = 1
        parts = {s: _deal_classes(data, s, holds, _rng(seed, s)) for s in SPLITS}
        if not self.disjoint:
            of_class = _by_class(data, "train")
            each = len(_where(data, "train")) // count // self.per_site
            parts["train"] = [np.concatenate([of_class[c][:each] for c in np.flatnonzero(h)]) for h in holds.T]
        return _shards(_names(count), parts)


class Dirichlet(Partition):
    """For each class, shares of the sites drawn from Dirichlet(alpha), the same for train, val and test."""

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(gt=0)
    min_size: int = Field(10, ge=1)  # training examples of the smallest site; drawn again until it holds

    def assign(self, data: Dataset, sites: int | None, seed: int) -> list[Shard]:
        count, n = _count(self, sites), len(_where(data, "train"))
        if count * self.min_size > n:
            raise Refused(
                f"{count} sites of at least {self.min_size} (partition.min_size) need {count * self.min_size} training "
                f"examples, but there are {n}; say fewer sites or a smaller min_size"
            )
        rng = np.random.default_rng([seed, SALT])
        of_class = np.array([len(c) for c in _by_class(data, "train")])
        smallest = 0
        for _ in range(DRAWS):
            shares = rng.dirichlet(np.full(count, self.alpha), len(of_class))  # (C, S)
            sizes = sum(np.diff(_cuts(m, row), prepend=0) for m, row in zip(of_class, shares, strict=True))
            smallest = max(smallest, int(np.min(sizes)))
            if smallest >= self.min_size:
                return _shards(_names(count), {s: _deal_classes(data, s, shares, _rng(seed, s)) for s in SPLITS})
        raise Refused(
            f"in {DRAWS} draws with alpha = {self.alpha} the smallest of {count} sites had at best {smallest} training "
            f"examples, not {self.min_size}; say a larger partition.alpha, a smaller min_size or fewer sites"
        )


class Quantity(Partition):
    """Alike in labels, unlike in number: `sizes` says each site's training examples (the rest is left out);
    `ratio` deals out everything in a geometric row in which the last site has `ratio` times the first's."""

    name: Literal["quantity"] = "quantity"
    sizes: tuple[PositiveInt, ...] | None = Field(None, min_length=1)
    ratio: float | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.sizes is None) == (self.ratio is None):
            raise ValueError("say either sizes or ratio")
        return self

    def assign(self, data: Dataset, sites: int | None, seed: int) -> list[Shard]:
        count, train = _count(self, sites), _where(data, "train")
        if self.sizes is None:
            shares = np.geomspace(1, self.ratio or 1, count)
            return _shards(_names(count), {s: _deal_units(data, s, shares, _rng(seed, s)) for s in SPLITS})
        if len(self.sizes) != count:
            raise Refused(f"partition.sizes has {len(self.sizes)} numbers for {count} sites; say one for each site")
        if sum(self.sizes) > len(train):
            raise Refused(
                f"partition.sizes add up to {sum(self.sizes)}, but there are {len(train)} training examples; say less, or partition = 'iid'"
            )
        shares = np.array(self.sizes, float)
        parts = {s: _deal_units(data, s, shares, _rng(seed, s)) for s in SPLITS}
        if data.unit is None:
            parts["train"] = np.split(_rng(seed, "train").permutation(train), np.cumsum(self.sizes))[:-1]
        parts["train"] = [part[:size] for part, size in zip(parts["train"], self.sizes, strict=True)]
        if short := [size for part, size in zip(parts["train"], self.sizes, strict=True) if len(part) < size]:
            raise Refused(
                f"partition.sizes: a {data.unit} goes to one site, so {short[0]} training examples cannot be had from the "
                f"{len(train)} there are; say smaller sizes, or have more data"
            )
        return _shards(_names(count), parts)


class ByKey(Partition):
    """One site for each name of a natural key, e.g. the hospital or the batch; `only` keeps some, in that order."""

    name: Literal["key"] = "key"
    by: str
    only: tuple[str, ...] | None = Field(None, min_length=1)

    def assign(self, data: Dataset, sites: int | None, seed: int) -> list[Shard]:
        key = data.keys.get(self.by)
        if key is None:
            valid = near(self.by, data.keys) if data.keys else "these have none: choose another partition"
            raise Refused(f"partition.by = {self.by!r} is no key of the data; {valid}")
        counts = dict(zip(key.names, torch.bincount(key.codes, minlength=len(key.names)).tolist(), strict=True))
        names = self.only or key.names
        for name in names:
            if name not in counts:
                raise Refused(f"partition.only: {self.by} has no {name!r}; {near(name, counts)}")
        if len(set(names)) < len(names):
            raise Refused("partition.only names a site twice; remove one")
        if sites and sites != len(names):
            raise Refused(
                f"sites.count = {sites}, but {self.by} has {len(names)} names "
                f"({_some([f'{name}: {counts[name]}' for name in names])}); "
                "leave sites.count out, or choose some by partition.only"
            )
        codes = key.codes.numpy()
        wanted = [key.names.index(name) for name in names]
        return _shards(names, {s: [w[codes[w] == k] for k in wanted] for s in SPLITS for w in [_where(data, s)]})


def _count(partition: Partition, sites: int | None) -> int:
    if not sites or sites < 1:
        raise Refused(f"partition {partition.name!r} needs a number of sites; say sites.count = 10, for example")
    return sites


def _names(count: int) -> list[str]:
    return [f"site-{i:0{max(2, len(str(count)))}d}" for i in range(1, count + 1)]


def _rng(seed: int, split: str) -> np.random.Generator:
    return np.random.default_rng([seed, SALT, SPLITS.index(split)])


def _where(data: Dataset, split: str) -> np.ndarray:
    return data.where(split).numpy()


def _by_class(data: Dataset, split: str) -> Parts:
    where = _where(data, split)
    labels = data.y.numpy()[where]
    return [where[labels == c] for c in range(len(data.classes))]


def _cuts(n: int, shares: np.ndarray) -> np.ndarray:
    """(S,) where n examples are cut so that site i gets its share; the last cut is n, so nothing is lost."""
    cuts: np.ndarray = np.rint(np.cumsum(shares) / shares.sum() * n).astype(np.int64)
    return cuts


def _deal(indices: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> Parts:
    return np.split(rng.permutation(indices), _cuts(len(indices), shares)[:-1])


def _deal_units(data: Dataset, split: str, shares: np.ndarray, rng: np.random.Generator) -> Parts:
    """Each unit to the site that still lacks most of its share; single examples where the data have no units."""
    where = _where(data, split)
    if data.unit is None:
        return _deal(where, shares, rng)
    units, member, sizes = np.unique(data.keys[data.unit].codes.numpy()[where], return_inverse=True, return_counts=True)
    lacks = shares / shares.sum() * len(where)
    site_of = np.empty(len(units), np.int64)
    for unit in rng.permutation(len(units)):
        site_of[unit] = np.argmax(lacks)
        lacks[site_of[unit]] -= sizes[unit]
    return [rng.permutation(where[site_of[member] == site]) for site in range(len(shares))]


def _deal_classes(data: Dataset, split: str, shares: np.ndarray, rng: np.random.Generator) -> Parts:
    """`shares`: (C, S); a class that no site holds is left out."""
    dealt = [_deal(c, row, rng) for c, row in zip(_by_class(data, split), shares, strict=True) if row.any()]
    return [np.concatenate(site) for site in zip(*dealt, strict=True)]


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")


def _shards(names: Sequence[str], parts: Mapping[str, Parts]) -> list[Shard]:
    empty = [name for name, train in zip(names, parts["train"], strict=True) if not len(train)]
    if empty:
        raise Refused(
            f"no training examples for {_some(empty)}; say fewer sites or another partition "
            "(with `key`: name the others in partition.only, or choose a key coarser than whom the splits keep whole)"
        )
    train, val, test = ([torch.from_numpy(np.sort(p)) for p in parts[s]] for s in SPLITS)
    return [Shard(*shard) for shard in zip(names, train, val, test, strict=True)]
