"""A study -> the data of its simulated sites: one pool of examples, and who holds which rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.aggregation.client_sampling import how_many
from pipeline.core.errors import Refused
from pipeline.core.seeding import seed_of
from pipeline.protocol.messages import SiteId
from pipeline.study.schema import Study
from sites.data.base import SPLITS, Dataset, carved, fingerprint
from sites.population.partition import Shard
from sites.training.base import Examples, Pool

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
    unit: str | None  # what `pool.unit` numbers: patient, slide, ...
    public: Tensor  # rows of the pool that nobody has to protect
    acquisitions: Mapping[SiteId, str]  # in words, where they differ
    unit_names: tuple[str, ...] = ()  # `pool.unit` counts through them

    def counts(self, who: SiteId) -> dict[str, list[int]]:
        """Examples by class in each split."""
        mine = self.examples[who]
        return {s: torch.bincount(self.pool.y[getattr(mine, s)], minlength=len(self.classes)).tolist() for s in SPLITS}


def populate(study: Study, root: Path | None, device: torch.device) -> Population:
    data = study.data.load(root, study.seed)
    notes = _no_validation(study, data)
    public, data = _set_apart(data, study.public.share, study.seed)
    common = _public(study, root, data)
    shards = study.partition.assign(data, study.sites.count, study.seed)
    _check(shards, study)
    seen, moved = _acquired(data, shards, study)
    if common is not None:
        public = torch.arange(len(seen.y), len(seen.y) + len(common.seen.y))
        seen = Seen.all_of([seen, common.seen])
    # sites may share rows (resampling, overlapping classes): pooled, each counts once
    train = torch.cat([s.train for s in moved]).unique() if study.strategy.pools else public
    distinct = len(torch.cat([s.train for s in shards]).unique())  # two scanners' views of one image are one example
    epoch = distinct if study.strategy.pools and distinct < len(train) else None
    held = Examples(train, data.where("val"), data.where("test"), epoch)
    examples = {s.name: Examples(s.train, s.val, s.test, s.epoch) for s in moved} | {COORDINATOR: held}
    on_device = {
        who: Examples(e.train.to(device), e.val.to(device), e.test.to(device), e.epoch) for who, e in examples.items()
    }
    unit = None if seen.unit is None else seen.unit.to(device)
    return Population(
        Pool(_ready(seen.x).to(device), seen.y.to(device), device, unit),
        tuple(s.name for s in moved),
        on_device,
        data.classes,
        data.shape,
        _identity(data, shards, "" if common is None else common.fingerprint),
        (*data.skipped, *notes),
        data.unit,
        public.to(device),
        {s.name: words for n, s in enumerate(shards) if (words := study.skew.describe(n, study.seed))},
        () if data.unit is None else data.keys[data.unit].names,
    )


def public_population(
    study: Study,
    root: Path | None,
    device: torch.device,
    sites: tuple[SiteId, ...],
    shape: tuple[int, ...],
    classes: tuple[str, ...],
) -> Population:
    """What a coordinator of real sites holds: the public examples, if any."""
    nothing = torch.zeros(0, dtype=torch.int64)
    x, y, digest = torch.zeros((0, *shape)), nothing, ""
    if study.public.data is not None:
        common = study.public.data.load(root, seed_of(study.seed, "public"))
        _same_form(common, shape, classes)
        normal = study.normalise.apply(common.x, torch.arange(len(common.y)))
        x, y, digest = common.x if normal is None else normal, common.y, common.fingerprint
    public = torch.arange(len(y), device=device)
    held = Examples(public, nothing.to(device), nothing.to(device))
    pool = Pool(_ready(x).to(device), y.to(device), device)
    return Population(pool, sites, {COORDINATOR: held}, classes, shape, digest, (), None, public, {})


def _same_form(common: Dataset, shape: tuple[int, ...], classes: tuple[str, ...]) -> None:
    if common.shape != shape or common.classes != classes:
        raise Refused(
            f"public.data has examples of shape {common.shape} and the classes {', '.join(common.classes)}, the study's "
            f"data {shape} and {', '.join(classes)}; set its size and task alike"
        )


def _identity(data: Dataset, shards: list[Shard], public: str) -> str:
    """The fingerprint of who holds what: other keys, class names or splits are other data, whatever the pixels."""
    digest = hashlib.sha256(f"{data.fingerprint} {data.classes} {[s.name for s in shards]} {public}".encode())
    for shard in shards:
        digest.update(fingerprint(shard.train, shard.val, shard.test).encode())
    if data.unit:  # the bootstrap draws them
        digest.update(fingerprint(data.keys[data.unit].codes).encode())
    return digest.hexdigest()


def _ready(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.numel() * 4 > FLOAT_LIMIT else x.float().div_(255)


def _no_validation(study: Study, data: Dataset) -> list[str]:
    """Told where whole units could not give the share that was asked for."""
    if not study.data.val or len(data.where("val")):
        return []
    unit = data.unit or "example"
    return [f"no whole {unit} was small enough for data.val: there is no validation, and the last round counts"]


def _set_apart(data: Dataset, share: float, seed: int) -> tuple[Tensor, Dataset]:
    """The coordinator's public examples, in whole units, and the data without them (they are in no split any more)."""
    codes = None if data.unit is None else data.keys[data.unit].codes.numpy()
    split = data.split.clone()
    public = torch.from_numpy(carved(split.numpy() == SPLITS.index("train"), share, [seed, 0x9B], codes))
    split[public] = len(SPLITS)
    return public, replace(data, split=split)


@dataclass(frozen=True)
class Common:
    seen: Seen
    fingerprint: str


def _public(study: Study, root: Path | None, data: Dataset) -> Common | None:
    """All examples of the public source: normalised as a site's, not skewed, and nobody's (unit -1)."""
    if study.public.data is None:
        return None
    common = study.public.data.load(root, seed_of(study.seed, "public"))  # not the study's own rendered cells
    _same_form(common, data.shape, data.classes)
    known = {row.tobytes() for row in common.x.numpy()}
    if any(row.tobytes() in known for row in data.x.numpy()):
        raise Refused(
            "public.data holds examples of the study's own data, which its sites protect; choose another source"
        )
    normal = study.normalise.apply(common.x, torch.arange(len(common.y)))
    x = common.x if normal is None else normal
    return Common(Seen(x, common.y, None if data.unit is None else torch.full((len(x),), -1)), common.fingerprint)


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


@dataclass(frozen=True)
class Seen:
    """Rows as they were seen: x (N, ...), y (N,), unit (N,)."""

    x: Tensor
    y: Tensor
    unit: Tensor | None

    @classmethod
    def all_of(cls, parts: Sequence[Seen]) -> Seen:
        if len(parts) == 1:
            return parts[0]
        units = [p.unit for p in parts if p.unit is not None]
        return cls(
            torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]), torch.cat(units) if units else None
        )

    def rows(self, index: Tensor) -> Seen:
        return Seen(self.x[index], self.y[index], None if self.unit is None else self.unit[index])


def _acquired(data: Dataset, shards: list[Shard], study: Study) -> tuple[Seen, list[Shard]]:
    """Sites whose acquisition or normalisation changes anything get rows of their own behind the common ones.

    The common ones are the coordinator's, normalised as if they were a site's.
    """
    unit = data.keys[data.unit].codes if data.unit else None
    common = study.normalise.apply(data.x, data.where("train"))
    seen, moved = [Seen(data.x if common is None else common, data.y, unit)], []
    end = len(data.y)
    for number, shard in enumerate(shards):
        rows = torch.cat([shard.train, shard.val, shard.test])
        x = _at_site(data.x[rows], number, len(shard.train), study)
        if x is None:
            moved.append(shard)
            continue
        seen.append(replace(seen[0].rows(rows), x=x))
        train, val, test = torch.arange(end, end + len(rows)).split([len(shard.train), len(shard.val), len(shard.test)])
        moved.append(Shard(shard.name, train, val, test, shard.epoch))
        end += len(rows)
    return Seen.all_of(seen), moved


def _at_site(x: Tensor, number: int, train: int, study: Study) -> Tensor | None:
    """The site's rows, training ones first, as its scanner sees them and its normalisation leaves them."""
    skewed = study.skew.apply(x, number, study.seed)
    normal = study.normalise.apply(x if skewed is None else skewed, torch.arange(train))
    return skewed if normal is None else normal
