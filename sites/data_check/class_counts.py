"""How much a site holds: examples by class and split, patients (or other units) by split, and what is too little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.coordinator.bootstrap import FEWEST
from sites.data.base import SPLITS, Dataset
from sites.data_check.examples import NO_SPLIT
from sites.data_check.findings import Finding, count, some

FEW = 10  # training examples of a class
UNEQUAL = 20  # times as many of the largest class as of the smallest


@dataclass(frozen=True)
class Census:
    classes: tuple[str, ...]
    counts: dict[str, list[int]]  # split -> by class; one split "all" where there are none
    unit: str | None
    units: dict[str, int]  # split -> how many patients, slides, ...

    @property
    def totals(self) -> list[int]:
        return [sum(column) for column in zip(*self.counts.values(), strict=True)]

    @property
    def examples(self) -> int:
        return sum(self.totals)

    def json(self) -> dict[str, Any]:
        by_class = {split: dict(zip(self.classes, counts, strict=True)) for split, counts in self.counts.items()}
        return {"examples": self.examples, "counts": by_class, "unit": self.unit, "units": self.units}


def count_up(data: Dataset) -> Census:
    y, split = data.y.numpy(), data.split.numpy()
    named = {"all": split == NO_SPLIT} if (split == NO_SPLIT).all() else {s: split == n for n, s in enumerate(SPLITS)}
    counts = {name: np.bincount(y[rows], minlength=len(data.classes)).tolist() for name, rows in named.items()}
    if data.unit is None:
        return Census(data.classes, counts, None, {})
    unit = data.keys[data.unit].codes.numpy()
    return Census(data.classes, counts, data.unit, {name: len(np.unique(unit[rows])) for name, rows in named.items()})


def findings(census: Census) -> Iterator[Finding]:
    if "all" in census.counts:
        return
    train, test = census.counts["train"], census.counts["test"]
    if absent := _classes(census, [n == 0 for n in train]):
        yield Finding(
            "look", "counts", f"no training examples of {some(absent)}",
            "fine if the site has none; the model learns these classes from other sites alone",
        )  # fmt: skip
    if few := [f"{name} ({n})" for name, n in zip(census.classes, train, strict=True) if 0 < n < FEW]:
        yield Finding(
            "look", "counts", f"fewer than {FEW} training examples of {some(few)}",
            "add some, or agree with the study lead to merge classes",
        )  # fmt: skip
    present = [n for n in train if n]
    if present and max(present) >= UNEQUAL * min(present):
        largest, smallest = (census.classes[train.index(n)] for n in (max(present), min(present)))
        yield Finding(
            "look", "counts", f"{max(present) / min(present):,.0f} times as many training examples of {largest} as of {smallest}",
            "usual where one class is rare; ask the study lead whether rare classes are weighed (local.balance)",
        )  # fmt: skip
    if lacking := _classes(census, [n == 0 and m > 0 for n, m in zip(test, train, strict=True)]):
        yield Finding(
            "look", "counts", f"no test examples of {some(lacking)}", "what the model is worth on them here will not be known"
        )  # fmt: skip
    yield from _units(census)


def _units(census: Census) -> Iterator[Finding]:
    if census.unit is None:
        yield Finding(
            "look", "counts", "the data do not say which images are of one patient",
            "list them in a manifest with a column patient, slide or group: else a patient may stand in training and in test, "
            "and privacy is promised to single images only",
        )  # fmt: skip
        return
    if 0 < census.units["test"] < FEWEST:
        yield Finding(
            "look", "counts", f"{count(census.units['test'], census.unit)} in the test split, fewer than {FEWEST}",
            "scores on so few have no confidence interval; set more apart if there are more",
        )  # fmt: skip
    if 0 < census.units["train"] < FEWEST:
        yield Finding(
            "look", "counts", f"{count(census.units['train'], census.unit)} in the training split, fewer than {FEWEST}",
            "noise that protects so few drowns what there is to learn; a study with noise gains little here",
        )  # fmt: skip


def _classes(census: Census, chosen: Sequence[bool]) -> list[str]:
    return [name for name, yes in zip(census.classes, chosen, strict=True) if yes]
