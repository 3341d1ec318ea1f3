"""Partitions on label vectors: every example is assigned once, a patient goes to one site, and seeds decide the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.core.errors import IncompatibleStudyError
from sites.data.base import SPLITS, Dataset, GroupKey
from sites.population.partition import (
    ClassPartitioner,
    DirichletPartitioner,
    IidPartitioner,
    KeyPartitioner,
    Partitioner,
    QuantityPartitioner,
    ResampledIidPartitioner,
    SitePartition,
)


def make_dataset(
    labels: Sequence[int], split: Sequence[int] | None = None, classes: int | None = None, **keys: list[str]
) -> Dataset:
    y = torch.as_tensor(labels)
    n = len(y)
    group_keys = {
        key: GroupKey(torch.tensor([sorted(set(values)).index(v) for v in values]), tuple(sorted(set(values))))
        for key, values in keys.items()
    }
    names = tuple(f"c{c}" for c in range(classes or int(y.max()) + 1))
    split_codes = torch.zeros(n, dtype=torch.uint8) if split is None else torch.tensor(split, dtype=torch.uint8)
    return Dataset(torch.zeros(n, 1), y, names, split_codes, "", group_keys)


def make_shuffled_dataset(classes: int, train: int, val: int, test: int) -> Dataset:
    """`train`, `val` and `test` examples of each class in random order."""
    y = np.tile(np.arange(classes), train + val + test)
    split = np.repeat([0, 1, 2], [classes * train, classes * val, classes * test])
    order = np.random.default_rng(0).permutation(len(y))
    return make_dataset(y[order], split[order], classes)


FASHION = make_shuffled_dataset(10, 6000, 0, 1000)
SMALL = make_shuffled_dataset(4, 50, 10, 20)


def histogram(data: Dataset, index: torch.Tensor) -> list[int]:
    return torch.bincount(data.y[index], minlength=len(data.classes)).tolist()


def all_rows(partitions: Sequence[SitePartition], split: str) -> list[int]:
    return sorted(torch.cat([getattr(s, split) for s in partitions]).tolist())


def are_equal(a: Sequence[SitePartition], b: Sequence[SitePartition]) -> bool:
    return all(
        x.name == y.name
        and x.examples_per_epoch == y.examples_per_epoch
        and all(torch.equal(getattr(x, s), getattr(y, s)) for s in SPLITS)
        for x, y in zip(a, b, strict=True)
    )


DISJOINT: list[Partitioner] = [
    IidPartitioner(),
    DirichletPartitioner(alpha=0.5, min_size=1),
    QuantityPartitioner(ratio=4),
    ClassPartitioner(per_site=2, disjoint=True),
]


@settings(deadline=None)
@given(st.sampled_from(DISJOINT), st.integers(4, 12), st.integers(0, 2**40))
def test_partition_assigns_every_example_once(partition: Partitioner, sites: int, seed: int) -> None:
    partitions = partition.assign(SMALL, sites, seed)
    assert len(partitions) == sites
    for split in SPLITS:
        assert all_rows(partitions, split) == SMALL.rows_in_split(split).tolist()


@settings(deadline=None)
@given(
    st.sampled_from(
        [*DISJOINT, ResampledIidPartitioner(), ClassPartitioner(per_site=3), QuantityPartitioner(sizes=(5, 1, 9, 2))]
    ),
    st.integers(0, 2**40),
)
def test_partition_is_deterministic(partition: Partitioner, seed: int) -> None:
    assert are_equal(partition.assign(SMALL, 4, seed), partition.assign(SMALL, 4, seed))


@pytest.mark.parametrize("partition", DISJOINT)
def test_partition_depends_on_the_seed(partition: Partitioner) -> None:
    assert not are_equal(partition.assign(SMALL, 4, 0), partition.assign(SMALL, 4, 1))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 99))
def test_iid_partition_is_even(sites: int, seed: int) -> None:
    sizes = [len(s.train) for s in IidPartitioner().assign(SMALL, sites, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_partition_indices_are_sorted_int64() -> None:
    for site_partition in DirichletPartitioner(alpha=1).assign(SMALL, 3, 0):
        for index in (site_partition.train, site_partition.val, site_partition.test):
            assert index.dtype == torch.int64
            assert index.tolist() == sorted(index.tolist())


@pytest.mark.parametrize(("sites", "first", "last"), [(2, "site-01", "site-02"), (100, "site-001", "site-100")])
def test_partition_site_names(sites: int, first: str, last: str) -> None:
    partitions = IidPartitioner().assign(SMALL, sites, 0)
    assert (partitions[0].name, partitions[-1].name) == (first, last)


def test_resampled_iid_sites_hold_the_whole_train_split() -> None:
    partitions = ResampledIidPartitioner().assign(FASHION, 10, 0)
    assert all(
        torch.equal(s.train, FASHION.rows_in_split("train")) and s.examples_per_epoch == 6000 for s in partitions
    )
    assert all_rows(partitions, "test") == FASHION.rows_in_split("test").tolist()
    assert IidPartitioner().assign(FASHION, 10, 0)[0].examples_per_epoch is None


def test_class_partition_five_classes_as_in_the_thesis() -> None:
    """6,000 images per site, of which only 12,000 are distinct."""
    partitions = ClassPartitioner(per_site=5).assign(FASHION, 10, 0)
    assert [len(s.train) for s in partitions] == [6000] * 10
    assert len(set(all_rows(partitions, "train"))) == 12_000
    assert histogram(FASHION, partitions[0].train) == [1200] * 5 + [0] * 5
    assert histogram(FASHION, partitions[7].train) == [1200, 1200, 0, 0, 0, 0, 0, 1200, 1200, 1200]
    first_threes = [i for i in FASHION.rows_in_split("train").tolist() if FASHION.y[i] == 3][:1200]
    for site in (0, 1, 2, 3, 9):
        train = partitions[site].train
        assert train[FASHION.y[train] == 3].tolist() == first_threes
    assert all_rows(partitions, "test") == FASHION.rows_in_split("test").tolist()
    assert histogram(FASHION, partitions[0].test) == [200] * 5 + [0] * 5


def test_class_partition_one_class_as_in_the_thesis() -> None:
    partitions = ClassPartitioner(per_site=1).assign(FASHION, 10, 0)
    for c, site_partition in enumerate(partitions):
        assert histogram(FASHION, site_partition.train) == [6000 * (k == c) for k in range(10)]
        assert histogram(FASHION, site_partition.test) == [1000 * (k == c) for k in range(10)]


def test_class_partition_disjoint_uses_every_image() -> None:
    partitions = ClassPartitioner(per_site=5, disjoint=True).assign(FASHION, 10, 0)
    assert all_rows(partitions, "train") == FASHION.rows_in_split("train").tolist()
    assert histogram(FASHION, partitions[2].train) == [0, 0, 1200, 1200, 1200, 1200, 1200, 0, 0, 0]


def test_class_partition_wraps_around_the_classes() -> None:
    partitions = ClassPartitioner(per_site=2).assign(SMALL, 6, 0)
    classes_by_site = [{c for c, n in enumerate(histogram(SMALL, s.train)) if n} for s in partitions]
    assert classes_by_site == [{0, 1}, {1, 2}, {2, 3}, {3, 0}, {0, 1}, {1, 2}]


def test_class_partition_with_a_rare_class() -> None:
    data = make_dataset([0] * 9 + [1])
    assert [histogram(data, s.train) for s in ClassPartitioner(per_site=1).assign(data, 2, 0)] == [[5, 0], [0, 1]]


@settings(deadline=None)
@given(st.integers(0, 50))
def test_dirichlet_partition_shares_are_equal_in_all_splits(seed: int) -> None:
    data = make_shuffled_dataset(3, 1000, 100, 500)
    for site_partition in DirichletPartitioner(alpha=0.3, min_size=1).assign(data, 5, seed):
        train, val, test = (np.array(histogram(data, getattr(site_partition, s))) for s in SPLITS)
        assert np.abs(train / 10 - val).max() <= 1.1
        assert np.abs(train / 2 - test).max() <= 1.5


def test_dirichlet_partition_alpha() -> None:
    def purity(alpha: float) -> float:
        partitions = DirichletPartitioner(alpha=alpha, min_size=1).assign(SMALL, 4, 0)
        return float(np.mean([max(h) / sum(h) for h in (histogram(SMALL, s.train) for s in partitions)]))

    assert purity(0.01) > 0.8
    assert purity(1e4) < 0.3


@settings(deadline=None)
@given(st.integers(0, 200))
def test_dirichlet_partition_min_size(seed: int) -> None:
    assert min(len(s.train) for s in DirichletPartitioner(alpha=0.3, min_size=15).assign(SMALL, 5, seed)) >= 15


def test_quantity_partition_ratio_is_geometric() -> None:
    assert [len(s.train) for s in QuantityPartitioner(ratio=4).assign(make_dataset([0, 1] * 35), 3, 0)] == [10, 20, 40]


def test_quantity_partition_sizes() -> None:
    partitions = QuantityPartitioner(sizes=(10, 30)).assign(SMALL, 2, 0)
    assert [len(s.train) for s in partitions] == [10, 30]
    assert [len(s.test) for s in partitions] == [20, 60]
    assert len(set(all_rows(partitions, "train"))) == 40


def test_key_partition_makes_a_site_per_name() -> None:
    data = make_dataset([0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 2, 2], hospital=["b", "a", "b", "c", "a", "b"])
    partitions = KeyPartitioner(by="hospital").assign(data, None, 0)
    assert [(s.name, s.train.tolist(), s.test.tolist()) for s in partitions] == [
        ("a", [1], [4]),
        ("b", [0, 2], [5]),
        ("c", [3], []),
    ]
    assert are_equal(partitions, KeyPartitioner(by="hospital").assign(data, 3, 0))
    assert are_equal(partitions, KeyPartitioner(by="hospital").assign(data, 0, 0))
    assert [s.name for s in KeyPartitioner(by="hospital", only=("c", "a")).assign(data, 2, 0)] == ["c", "a"]


HOSPITALS = make_dataset([0, 1, 0], [0, 0, 2], hospital=["a", "a", "b"])


@pytest.mark.parametrize(
    ("partition", "sites", "message"),
    [
        (IidPartitioner(), None, "set sites.count"),
        (IidPartitioner(), 0, "set sites.count"),
        (IidPartitioner(), 201, "no training examples for site-.*; set fewer sites"),
        (ResampledIidPartitioner(), None, "set sites.count"),
        (ResampledIidPartitioner(), 201, "set fewer sites"),
        (ClassPartitioner(per_site=5), 4, "per_site = 5, but the data have 4 classes; set at most 4"),
        (ClassPartitioner(per_site=1), 201, "set fewer sites"),
        (DirichletPartitioner(alpha=1), 21, "need 210 training examples, but there are 200; set fewer"),
        (DirichletPartitioner(alpha=1e-3), 20, "at most .* examples, not 10; set a larger partition.alpha"),
        (QuantityPartitioner(sizes=(1, 2)), 3, "2 numbers for 3 sites"),
        (QuantityPartitioner(sizes=(100, 101)), 2, "add up to 201, but there are 200"),
        (QuantityPartitioner(ratio=1000), 20, "set fewer sites"),
        (KeyPartitioner(by="hospital"), None, "it has no keys"),
    ],
)
def test_partition_errors_name_the_cure(partition: Partitioner, sites: int | None, message: str) -> None:
    with pytest.raises(IncompatibleStudyError, match=message):
        partition.assign(SMALL, sites, 0)


@pytest.mark.parametrize(
    ("partition", "sites", "message"),
    [
        (KeyPartitioner(by="hopsital"), None, "did you mean 'hospital'"),
        (KeyPartitioner(by="hospital"), 3, "has 2 values .a: 2, b: 1.; omit sites.count"),
        (KeyPartitioner(by="hospital", only=("x",)), None, "has no 'x'; valid: a, b"),
        (KeyPartitioner(by="hospital", only=("a", "a")), None, "twice"),
        (KeyPartitioner(by="hospital"), None, "no training examples for b;.*partition.only"),
    ],
)
def test_key_partition_errors_name_the_cure(partition: Partitioner, sites: int | None, message: str) -> None:
    with pytest.raises(IncompatibleStudyError, match=message):
        partition.assign(HOSPITALS, sites, 0)


def test_quantity_partition_takes_sizes_or_ratio() -> None:
    for fields in ({}, {"sizes": (1, 2), "ratio": 2}):
        with pytest.raises(ValidationError, match="either sizes or ratio"):
            QuantityPartitioner(**fields)


def make_patients_dataset(count: int = 60, seed: int = 0) -> Dataset:
    """Patients with 5 to 40 cells, each in one split."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, 41, count)
    split = np.repeat(rng.choice(3, count, p=[0.6, 0.2, 0.2]), sizes)
    named = [f"p{p:02}" for p in np.repeat(np.arange(count), sizes)]
    data = make_dataset(rng.integers(0, 2, len(split)), split, 2, patient=named)
    return replace(data, privacy_unit="patient")


@settings(deadline=None)
@given(st.sampled_from([IidPartitioner(), QuantityPartitioner(ratio=4)]), st.integers(2, 6), st.integers(0, 2**40))
def test_partition_assigns_a_patient_to_one_site(partition: Partitioner, sites: int, seed: int) -> None:
    data = make_patients_dataset()
    partitions = partition.assign(data, sites, seed)
    codes = data.keys["patient"].codes
    for split in SPLITS:
        assert all_rows(partitions, split) == data.rows_in_split(split).tolist()
        units_by_site = [set(codes[getattr(s, split)].tolist()) for s in partitions]
        assert sum(map(len, units_by_site)) == len(set.union(*units_by_site))


def test_partition_sizes_with_whole_patients() -> None:
    data = make_patients_dataset(200)
    sizes = [len(s.train) for s in IidPartitioner().assign(data, 4, 0)]
    assert max(sizes) - min(sizes) <= 40
    small, *_, large = (len(s.train) for s in QuantityPartitioner(ratio=5).assign(data, 4, 0))
    assert large / small == pytest.approx(5, rel=0.15)


def test_quantity_partition_sizes_are_exact_and_split_at_most_the_last_patient() -> None:
    data = make_patients_dataset(200)
    sizes = (120, 300, 500)
    partitions = QuantityPartitioner(sizes=sizes).assign(data, 3, 1)
    assert tuple(len(s.train) for s in partitions) == sizes
    codes = data.keys["patient"].codes
    units_by_site = [set(codes[s.train].tolist()) for s in partitions]
    assert sum(map(len, units_by_site)) == len(set.union(*units_by_site))
    n = len(data.rows_in_split("train"))
    with pytest.raises(IncompatibleStudyError, match="a patient belongs to one site"):
        QuantityPartitioner(sizes=(n // 2, n - n // 2)).assign(data, 2, 1)
