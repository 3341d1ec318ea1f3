"""A study -> the data of its simulated sites: one pool of examples, and who holds which rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.aggregation.client_sampling import num_sampled_clients
from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.seeding import derive_seed
from pipeline.protocol.messages import SiteId
from pipeline.study.schema import Study
from sites.data.base import SPLITS, Dataset, fingerprint, sample_whole_units
from sites.data.pool import ExamplePool, SplitIndices
from sites.population.partition import SitePartition

COORDINATOR: SiteId = "coordinator"
MAX_FLOAT_BYTES = 2 << 30  # bytes: images are kept as floats, ready to use, while they take no more than this


@dataclass(frozen=True)
class FederatedDataset:
    """Everything that a simulation knows about its data."""

    pool: ExamplePool
    sites: tuple[SiteId, ...]
    split_indices: Mapping[SiteId, SplitIndices]  # of every site, and of COORDINATOR
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    fingerprint: str
    skipped: tuple[str, ...]
    privacy_unit: str | None  # what `pool.unit` numbers: patient, slide, ...
    public_indices: Tensor  # rows of the pool that nobody has to protect
    acquisition_descriptions: Mapping[SiteId, str]  # in words, where they differ
    unit_names: tuple[str, ...] = ()  # `pool.unit` counts through them

    def class_counts(self, site: SiteId) -> dict[str, list[int]]:
        """Examples by class in each split."""
        site_indices = self.split_indices[site]
        return {
            s: torch.bincount(self.pool.y[getattr(site_indices, s)], minlength=len(self.classes)).tolist()
            for s in SPLITS
        }


def load_federated_data(study: Study, root: Path | None, device: torch.device) -> FederatedDataset:
    data = study.data.load(root, study.seed)
    validation_notes = _missing_validation_notes(study, data)
    public_indices, data = _split_off_public(data, study.public.fraction, study.seed)
    public_data = _load_public_data(study, root, data)
    assigned_partitions = study.partition.assign(data, study.sites.count, study.seed)
    _check_partitions(assigned_partitions, study)
    acquired, partitions = _apply_acquisition(data, assigned_partitions, study)
    if public_data is not None:
        public_indices = torch.arange(len(acquired.y), len(acquired.y) + len(public_data.examples.y))
        acquired = AcquiredExamples.concatenate([acquired, public_data.examples])
    # sites may share rows (resampling, overlapping classes): pooled, each counts once
    coordinator_train = (
        torch.cat([s.train for s in partitions]).unique() if study.strategy.requires_pooled_data else public_indices
    )
    num_distinct = len(
        torch.cat([s.train for s in assigned_partitions]).unique()
    )  # two scanners' views of one image are one example
    examples_per_epoch = (
        num_distinct if study.strategy.requires_pooled_data and num_distinct < len(coordinator_train) else None
    )
    coordinator_indices = SplitIndices(
        coordinator_train, data.rows_in_split("val"), data.rows_in_split("test"), examples_per_epoch
    )
    split_indices = {s.name: SplitIndices(s.train, s.val, s.test, s.examples_per_epoch) for s in partitions} | {
        COORDINATOR: coordinator_indices
    }
    indices_on_device = {
        site: SplitIndices(e.train.to(device), e.val.to(device), e.test.to(device), e.examples_per_epoch)
        for site, e in split_indices.items()
    }
    unit_ids = None if acquired.unit_ids is None else acquired.unit_ids.to(device)
    return FederatedDataset(
        pool=ExamplePool(_as_network_input(acquired.x).to(device), acquired.y.to(device), device, unit_ids),
        sites=tuple(s.name for s in partitions),
        split_indices=indices_on_device,
        classes=data.classes,
        shape=data.shape,
        fingerprint=_partition_fingerprint(
            data, assigned_partitions, "" if public_data is None else public_data.fingerprint
        ),
        skipped=(*data.skipped, *validation_notes),
        privacy_unit=data.privacy_unit,
        public_indices=public_indices.to(device),
        acquisition_descriptions={
            s.name: description
            for n, s in enumerate(assigned_partitions)
            if (description := study.feature_skew.describe(n, study.seed))
        },
        unit_names=() if data.privacy_unit is None else data.keys[data.privacy_unit].names,
    )


def load_public_federated_data(
    study: Study,
    root: Path | None,
    device: torch.device,
    sites: tuple[SiteId, ...],
    shape: tuple[int, ...],
    classes: tuple[str, ...],
) -> FederatedDataset:
    """What a coordinator of real sites holds: the public examples, if any."""
    no_indices = torch.zeros(0, dtype=torch.int64)
    x, y, digest = torch.zeros((0, *shape)), no_indices, ""
    if study.public.data is not None:
        public_data = study.public.data.load(root, derive_seed(study.seed, "public"))
        _check_same_format(public_data, shape, classes)
        normalized = study.normalization.apply(public_data.x, torch.arange(len(public_data.y)))
        x, y, digest = public_data.x if normalized is None else normalized, public_data.y, public_data.fingerprint
    public_indices = torch.arange(len(y), device=device)
    coordinator_indices = SplitIndices(public_indices, no_indices.to(device), no_indices.to(device))
    pool = ExamplePool(_as_network_input(x).to(device), y.to(device), device)
    return FederatedDataset(
        pool=pool,
        sites=sites,
        split_indices={COORDINATOR: coordinator_indices},
        classes=classes,
        shape=shape,
        fingerprint=digest,
        skipped=(),
        privacy_unit=None,
        public_indices=public_indices,
        acquisition_descriptions={},
    )


def _check_same_format(public_data: Dataset, shape: tuple[int, ...], classes: tuple[str, ...]) -> None:
    if public_data.shape != shape or public_data.classes != classes:
        raise IncompatibleStudyError(
            f"public.data has examples of shape {public_data.shape} and the classes {', '.join(public_data.classes)}, the study's "
            f"data {shape} and {', '.join(classes)}; set its size and task alike"
        )


def _partition_fingerprint(data: Dataset, partitions: list[SitePartition], public_fingerprint: str) -> str:
    """The fingerprint of who holds what: other keys, class names or splits are other data, whatever the pixels."""
    digest = hashlib.sha256(
        f"{data.fingerprint} {data.classes} {[s.name for s in partitions]} {public_fingerprint}".encode()
    )
    for partition in partitions:
        digest.update(fingerprint(partition.train, partition.val, partition.test).encode())
    if data.privacy_unit:  # the bootstrap draws them
        digest.update(fingerprint(data.keys[data.privacy_unit].codes).encode())
    return digest.hexdigest()


def _as_network_input(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.numel() * 4 > MAX_FLOAT_BYTES else x.float().div_(255)


def _missing_validation_notes(study: Study, data: Dataset) -> list[str]:
    """Told where whole units could not give the share that was asked for."""
    if not study.data.val or len(data.rows_in_split("val")):
        return []
    unit = data.privacy_unit or "example"
    return [f"no whole {unit} was small enough for data.val: there is no validation, and the last round counts"]


def _split_off_public(data: Dataset, fraction: float, seed: int) -> tuple[Tensor, Dataset]:
    """The coordinator's public examples, in whole units, and the data without them (they are in no split any more)."""
    unit_ids = None if data.privacy_unit is None else data.keys[data.privacy_unit].codes.numpy()
    split = data.split.clone()
    public_indices = torch.from_numpy(
        sample_whole_units(split.numpy() == SPLITS.index("train"), fraction, [seed, 0x9B], unit_ids)
    )
    split[public_indices] = len(SPLITS)
    return public_indices, replace(data, split=split)


@dataclass(frozen=True)
class PublicData:
    examples: AcquiredExamples
    fingerprint: str


def _load_public_data(study: Study, root: Path | None, data: Dataset) -> PublicData | None:
    """All examples of the public source: normalised as a site's, not skewed, and nobody's (unit -1)."""
    if study.public.data is None:
        return None
    public_dataset = study.public.data.load(
        root, derive_seed(study.seed, "public")
    )  # not the study's own rendered cells
    _check_same_format(public_dataset, data.shape, data.classes)
    public_rows = {row.tobytes() for row in public_dataset.x.numpy()}
    if any(row.tobytes() in public_rows for row in data.x.numpy()):
        raise IncompatibleStudyError(
            "public.data holds examples of the study's own data, which its sites protect; choose another source"
        )
    normalized = study.normalization.apply(public_dataset.x, torch.arange(len(public_dataset.y)))
    x = public_dataset.x if normalized is None else normalized
    return PublicData(
        AcquiredExamples(x, public_dataset.y, None if data.privacy_unit is None else torch.full((len(x),), -1)),
        public_dataset.fingerprint,
    )


def _check_partitions(partitions: list[SitePartition], study: Study) -> None:
    empty = [s.name for s in partitions if not len(s.train)]
    if empty:
        raise IncompatibleStudyError(
            f"{', '.join(empty)}: no training examples; fewer sites, another partition or seed would give them some"
        )
    num_sampled = num_sampled_clients(len(partitions), study.client_sampling.fraction)
    if study.round.quorum > num_sampled:
        raise IncompatibleStudyError(
            f"round.quorum is {study.round.quorum} but {num_sampled} of {len(partitions)} sites are asked a round; "
            "lower it, or raise client_sampling.fraction"
        )
    if COORDINATOR in (s.name for s in partitions):
        raise IncompatibleStudyError(f"no site may be called {COORDINATOR!r}; rename it in the data")
    for key in ("speed", "dropout"):
        values = getattr(study.sites, key)
        if isinstance(values, tuple) and len(values) != len(partitions):
            raise IncompatibleStudyError(
                f"sites.{key} has {len(values)} values for {len(partitions)} sites; give one each, or one for all"
            )


@dataclass(frozen=True)
class AcquiredExamples:
    """Rows as they were seen: x (N, ...), y (N,), unit (N,)."""

    x: Tensor
    y: Tensor
    unit_ids: Tensor | None

    @classmethod
    def concatenate(cls, parts: Sequence[AcquiredExamples]) -> AcquiredExamples:
        if len(parts) == 1:
            return parts[0]
        unit_ids = [p.unit_ids for p in parts if p.unit_ids is not None]
        return cls(
            torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]), torch.cat(unit_ids) if unit_ids else None
        )

    def select_rows(self, index: Tensor) -> AcquiredExamples:
        return AcquiredExamples(self.x[index], self.y[index], None if self.unit_ids is None else self.unit_ids[index])


def _apply_acquisition(
    data: Dataset, partitions: list[SitePartition], study: Study
) -> tuple[AcquiredExamples, list[SitePartition]]:
    """Sites whose acquisition or normalisation changes anything get rows of their own behind the common ones.

    The common ones are the coordinator's, normalised as if they were a site's.
    """
    unit_ids = data.keys[data.privacy_unit].codes if data.privacy_unit else None
    normalized = study.normalization.apply(data.x, data.rows_in_split("train"))
    acquired, moved_partitions = [AcquiredExamples(data.x if normalized is None else normalized, data.y, unit_ids)], []
    num_rows = len(data.y)
    for site_index, partition in enumerate(partitions):
        rows = torch.cat([partition.train, partition.val, partition.test])
        x = _acquire_at_site(data.x[rows], site_index, len(partition.train), study)
        if x is None:
            moved_partitions.append(partition)
            continue
        acquired.append(replace(acquired[0].select_rows(rows), x=x))
        train, val, test = torch.arange(num_rows, num_rows + len(rows)).split(
            [len(partition.train), len(partition.val), len(partition.test)]
        )
        moved_partitions.append(SitePartition(partition.name, train, val, test, partition.examples_per_epoch))
        num_rows += len(rows)
    return AcquiredExamples.concatenate(acquired), moved_partitions


def _acquire_at_site(x: Tensor, site_index: int, num_train: int, study: Study) -> Tensor | None:
    """The site's rows, training ones first, as its scanner sees them and its normalisation leaves them."""
    skewed = study.feature_skew.apply(x, site_index, study.seed)
    normalized = study.normalization.apply(x if skewed is None else skewed, torch.arange(num_train))
    return skewed if normalized is None else normalized
