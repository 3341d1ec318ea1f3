"""A study -> the data of its simulated sites: one pool of examples, and who holds which rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import Refused
from pipeline.messages import SiteId
from pipeline.select import how_many
from pipeline.study import Study
from sites.data.base import SPLITS, Dataset, fingerprint
from sites.partition import Shard
from sites.trainers.base import Examples, Pool

COORDINATOR: SiteId = "coordinator"
FLOAT_LIMIT = 2 << 30  # bytes: images are kept as floats, ready to use, while they take no more than this


@dataclass(frozen=True)
class Population:
    """Everything that a simulation knows about its data."""

    pool: Pool
    sites: tuple[SiteId, ...]
    examples: Mapping[SiteId, Examples]  # of every site, and of COORDINATOR
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    fingerprint: str
    skipped: tuple[str, ...]

    def counts(self, who: SiteId) -> dict[str, list[int]]:
        """Examples by class in each split."""
        mine = self.examples[who]
        return {s: torch.bincount(self.pool.y[getattr(mine, s)], minlength=len(self.classes)).tolist() for s in SPLITS}


def populate(study: Study, root: Path | None, device: torch.device) -> Population:
    data = study.data.load(root, study.seed)
    public, data = _set_apart(data, study.public.share, study.seed)
    shards = study.partition.assign(data, study.sites.count, study.seed)
    _check(shards, study)
    x, y, moved = _skewed(data, shards, study)
    # sites may share rows (resampling, overlapping classes): pooled, each counts once
    train = torch.cat([s.train for s in moved]).unique() if study.strategy.pools else public
    held = Examples(train, data.where("val"), data.where("test"))
    examples = {s.name: Examples(s.train, s.val, s.test, s.epoch) for s in moved} | {COORDINATOR: held}
    on_device = {
        who: Examples(e.train.to(device), e.val.to(device), e.test.to(device), e.epoch) for who, e in examples.items()
    }
    pool = Pool(_ready(x).to(device), y.to(device), device)
    names = tuple(s.name for s in moved)
    return Population(pool, names, on_device, data.classes, data.shape, _identity(data, moved), data.skipped)


def _identity(data: Dataset, shards: list[Shard]) -> str:
    """The fingerprint of who holds what: other keys, class names or splits are other data, whatever the pixels."""
    digest = hashlib.sha256(f"{data.fingerprint} {data.classes} {[s.name for s in shards]}".encode())
    for shard in shards:
        digest.update(fingerprint(shard.train, shard.val, shard.test).encode())
    return digest.hexdigest()


def _ready(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.numel() * 4 > FLOAT_LIMIT else x.float().div_(255)


def _set_apart(data: Dataset, share: float, seed: int) -> tuple[Tensor, Dataset]:
    """The coordinator's public examples, and the data without them (they are in no split any more)."""
    train = data.where("train")
    order = torch.from_numpy(np.random.default_rng([seed, 0x9B]).permutation(len(train)))
    public = train[order[: round(share * len(train))]].sort().values
    split = data.split.clone()
    split[public] = len(SPLITS)
    return public, replace(data, split=split)


def _check(shards: list[Shard], study: Study) -> None:
    empty = [s.name for s in shards if not len(s.train)]
    if empty:
        raise Refused(
            f"{', '.join(empty)}: no training examples; fewer sites, another partition or seed would give them some"
        )
    asked = how_many(len(shards), study.selection.fraction)
    if study.waiting.quorum > asked:
        raise Refused(
            f"waiting.quorum is {study.waiting.quorum} but {asked} of {len(shards)} sites are asked a round; "
            "lower it, or raise selection.fraction"
        )
    if COORDINATOR in (s.name for s in shards):
        raise Refused(f"no site may be called {COORDINATOR!r}; rename it in the data")
    for key in ("speed", "dropout"):
        given = getattr(study.sites, key)
        if isinstance(given, tuple) and len(given) != len(shards):
            raise Refused(f"sites.{key} has {len(given)} values for {len(shards)} sites; give one each, or one for all")


def _skewed(data: Dataset, shards: list[Shard], study: Study) -> tuple[Tensor, Tensor, list[Shard]]:
    """Sites whose acquisition differs get rows of their own behind the common ones."""
    x, y, moved = [data.x], [data.y], []
    end = len(data.y)
    for number, shard in enumerate(shards):
        rows = torch.cat([shard.train, shard.val, shard.test])
        seen = study.skew.apply(data.x[rows], number, study.seed)
        if seen is None:
            moved.append(shard)
            continue
        x.append(seen)
        y.append(data.y[rows])
        train, val, test = torch.arange(end, end + len(rows)).split([len(shard.train), len(shard.val), len(shard.test)])
        moved.append(Shard(shard.name, train, val, test, shard.epoch))
        end += len(rows)
    return (data.x, data.y, moved) if len(x) == 1 else (torch.cat(x), torch.cat(y), moved)
