"""Loads a study's data for its simulated sites: one pool of examples, and each site's rows of it."""

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
MAX_FLOAT_BYTES = 2 << 30  # images are stored as float32 up to this size, else as uint8


@dataclass(frozen=True)
class FederatedDataset:
    """The data of all sites of a simulation, or of one real site."""

    pool: ExamplePool
    sites: tuple[SiteId, ...]
    split_indices: Mapping[SiteId, SplitIndices]  # of every site, and of COORDINATOR
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of one example: (C, H, W), or (F,)
    fingerprint: str
    skipped: tuple[str, ...]  # files left out, each with its reason, and notes about the splits
    privacy_unit: str | None  # what `pool.unit_ids` numbers: patient, slide, ...
    public_indices: Tensor  # pool rows of the public examples, which have no privacy cost
    acquisition_descriptions: Mapping[SiteId, str]  # only of sites whose acquisition differs
    unit_names: tuple[str, ...] = ()  # unit_names[pool.unit_ids[i]] is example i's unit

    def class_counts(self, site: SiteId) -> dict[str, list[int]]:
        """split -> number of examples of each class."""
        site_indices = self.split_indices[site]
        return {
            split: torch.bincount(self.pool.y[getattr(site_indices, split)], minlength=len(self.classes)).tolist()
            for split in SPLITS
        }


def load_federated_data(study: Study, root: Path | None, device: torch.device) -> FederatedDataset:
    """Loads, partitions, skews and normalizes the study's data. `root`: as in `DataSource.load`."""
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
    coordinator_train, examples_per_epoch = public_indices, None
    if study.strategy.requires_pooled_data:
        # sites may share rows (resampling, overlapping classes); the pooled data contain each row once
        coordinator_train = torch.cat([s.train for s in partitions]).unique()
        # one image as two scanners acquire it is two rows but one example
        num_distinct = len(torch.cat([s.train for s in assigned_partitions]).unique())
        examples_per_epoch = num_distinct if num_distinct < len(coordinator_train) else None
    split_indices = {s.name: SplitIndices(s.train, s.val, s.test, s.examples_per_epoch) for s in partitions} | {
        COORDINATOR: SplitIndices(
            coordinator_train, data.rows_in_split("val"), data.rows_in_split("test"), examples_per_epoch
        )
    }
    indices_on_device = {
        site: SplitIndices(
            indices.train.to(device), indices.val.to(device), indices.test.to(device), indices.examples_per_epoch
        )
        for site, indices in split_indices.items()
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
            partition.name: description
            for site_index, partition in enumerate(assigned_partitions)
            if (description := study.feature_skew.describe(site_index, study.seed))
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
    """The data of a coordinator of real sites: the public examples, if any."""
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
            f"public.data has examples of shape {public_data.shape} and the classes {', '.join(public_data.classes)}, "
            f"the study's data {shape} and {', '.join(classes)}; set the same size and task for both"
        )


def _partition_fingerprint(data: Dataset, partitions: list[SitePartition], public_fingerprint: str) -> str:
    """Fingerprint of the partition. It changes with keys, class names and splits too, even if the pixels are equal."""
    digest = hashlib.sha256(
        f"{data.fingerprint} {data.classes} {[s.name for s in partitions]} {public_fingerprint}".encode()
    )
    for partition in partitions:
        digest.update(fingerprint(partition.train, partition.val, partition.test).encode())
    if data.privacy_unit:  # the bootstrap resamples units, so they decide the result
        digest.update(fingerprint(data.keys[data.privacy_unit].codes).encode())
    return digest.hexdigest()


def _as_network_input(x: Tensor) -> Tensor:
    return x if x.is_floating_point() or x.numel() * 4 > MAX_FLOAT_BYTES else x.float().div_(255)


def _missing_validation_notes(study: Study, data: Dataset) -> list[str]:
    """A note if `data.val` is smaller than every privacy unit, so that the validation split is empty."""
    if not study.data.val or len(data.rows_in_split("val")):
        return []
    unit = data.privacy_unit or "example"
    return [f"no {unit} is small enough for data.val: without validation examples, the last round's model is selected"]


def _split_off_public(data: Dataset, fraction: float, seed: int) -> tuple[Tensor, Dataset]:
    """The coordinator's public examples, in whole units, and the data without them (they leave all splits)."""
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
    """All examples of the public source: normalized like a site's, without feature skew and privacy unit (unit -1)."""
    if study.public.data is None:
        return None
    # with the study's own seed a rendering source would repeat the sites' cells
    public_dataset = study.public.data.load(root, derive_seed(study.seed, "public"))
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
            f"{', '.join(empty)}: no training examples; set fewer sites, another partition or another seed"
        )
    num_sampled = num_sampled_clients(len(partitions), study.client_sampling.fraction)
    if study.round.quorum > num_sampled:
        raise IncompatibleStudyError(
            f"round.quorum is {study.round.quorum}, but a round samples {num_sampled} of {len(partitions)} sites; "
            "lower it, or raise client_sampling.fraction"
        )
    if COORDINATOR in (s.name for s in partitions):
        raise IncompatibleStudyError(f"a site must not be called {COORDINATOR!r}; rename it in the data")
    for key in ("speed", "dropout"):
        values = getattr(study.sites, key)
        if isinstance(values, tuple) and len(values) != len(partitions):
            raise IncompatibleStudyError(
                f"sites.{key} has {len(values)} values for {len(partitions)} sites; give one per site, or one for all"
            )


@dataclass(frozen=True)
class AcquiredExamples:
    """Examples after acquisition and normalization: x (N, ...), y (N,), unit_ids (N,)."""

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
    """Applies feature skew and normalization. Sites whose images change get new rows after the shared ones.

    The shared rows are the coordinator's, normalized as one site.
    """
    unit_ids = data.keys[data.privacy_unit].codes if data.privacy_unit else None
    normalized = study.normalization.apply(data.x, data.rows_in_split("train"))
    shared = AcquiredExamples(data.x if normalized is None else normalized, data.y, unit_ids)
    acquired = [shared]
    acquired_partitions: list[SitePartition] = []
    num_rows = len(data.y)
    for site_index, partition in enumerate(partitions):
        rows = torch.cat([partition.train, partition.val, partition.test])
        x = _acquire_at_site(data.x[rows], site_index, len(partition.train), study)
        if x is None:
            acquired_partitions.append(partition)
            continue
        acquired.append(replace(shared.select_rows(rows), x=x))
        train, val, test = torch.arange(num_rows, num_rows + len(rows)).split(
            [len(partition.train), len(partition.val), len(partition.test)]
        )
        acquired_partitions.append(SitePartition(partition.name, train, val, test, partition.examples_per_epoch))
        num_rows += len(rows)
    return AcquiredExamples.concatenate(acquired), acquired_partitions


def _acquire_at_site(x: Tensor, site_index: int, num_train: int, study: Study) -> Tensor | None:
    """The site's rows (training split first) with its feature skew and normalization; None: unchanged."""
    skewed = study.feature_skew.apply(x, site_index, study.seed)
    normalized = study.normalization.apply(x if skewed is None else skewed, torch.arange(num_train))
    return skewed if normalized is None else normalized
