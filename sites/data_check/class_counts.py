"""Numbers of examples by class and split, of patients (or other units) by split, and findings on what is too little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.coordinator.bootstrap import MIN_UNITS
from sites.data.base import SPLITS, Dataset
from sites.data_check.examples import UNASSIGNED_SPLIT
from sites.data_check.findings import Finding, format_count, join_names

MIN_CLASS_EXAMPLES = 10  # training examples of a class
MAX_CLASS_IMBALANCE = 20  # ratio of the largest class to the smallest


@dataclass(frozen=True)
class ClassCounts:
    classes: tuple[str, ...]
    counts: dict[str, list[int]]  # split -> number by class; a single split "all" if the data have no splits
    unit: str | None
    num_units: dict[str, int]  # split -> number of patients, slides, ...

    @property
    def totals_by_class(self) -> list[int]:
        return [sum(column) for column in zip(*self.counts.values(), strict=True)]

    @property
    def num_examples(self) -> int:
        return sum(self.totals_by_class)

    def to_dict(self) -> dict[str, Any]:
        by_class = {split: dict(zip(self.classes, counts, strict=True)) for split, counts in self.counts.items()}
        return {"examples": self.num_examples, "counts": by_class, "unit": self.unit, "units": self.num_units}


def count_classes(dataset: Dataset) -> ClassCounts:
    y, split = dataset.y.numpy(), dataset.split.numpy()
    rows_by_split = (
        {"all": split == UNASSIGNED_SPLIT}
        if (split == UNASSIGNED_SPLIT).all()
        else {name: split == index for index, name in enumerate(SPLITS)}
    )
    counts = {
        name: np.bincount(y[rows], minlength=len(dataset.classes)).tolist() for name, rows in rows_by_split.items()
    }
    if dataset.privacy_unit is None:
        return ClassCounts(dataset.classes, counts, None, {})
    unit_codes = dataset.keys[dataset.privacy_unit].codes.numpy()
    return ClassCounts(
        dataset.classes,
        counts,
        dataset.privacy_unit,
        {name: len(np.unique(unit_codes[rows])) for name, rows in rows_by_split.items()},
    )


def class_count_findings(class_counts: ClassCounts) -> Iterator[Finding]:
    if "all" in class_counts.counts:
        return
    train, test = class_counts.counts["train"], class_counts.counts["test"]
    if absent := _select_classes(class_counts, [n == 0 for n in train]):
        yield Finding(
            "look",
            "counts",
            f"no training examples of {join_names(absent)}",
            "no action needed if the site has none: the model learns these classes from the other sites only",
        )
    if few := [
        f"{name} ({n})" for name, n in zip(class_counts.classes, train, strict=True) if 0 < n < MIN_CLASS_EXAMPLES
    ]:
        yield Finding(
            "look",
            "counts",
            f"fewer than {MIN_CLASS_EXAMPLES} training examples of {join_names(few)}",
            "add examples, or ask the study lead whether to merge classes",
        )
    present = [n for n in train if n]
    if present and max(present) >= MAX_CLASS_IMBALANCE * min(present):
        largest, smallest = (class_counts.classes[train.index(n)] for n in (max(present), min(present)))
        yield Finding(
            "look",
            "counts",
            f"{max(present) / min(present):,.0f} times as many training examples of {largest} as of {smallest}",
            "usual if a class is rare; ask the study lead whether the study gives rare classes more weight (local.class_balance)",
        )
    if untested := _select_classes(class_counts, [n == 0 and m > 0 for n, m in zip(test, train, strict=True)]):
        yield Finding(
            "look",
            "counts",
            f"no test examples of {join_names(untested)}",
            "add test examples if you can: without them, the model's performance on these classes cannot be measured here",
        )
    yield from _unit_findings(class_counts)


def _unit_findings(class_counts: ClassCounts) -> Iterator[Finding]:
    if class_counts.unit is None:
        yield Finding(
            "look",
            "counts",
            "the data do not state which images belong to the same patient",
            "list the images in a manifest with a column patient, slide or group: otherwise images of one patient may be in "
            "both training and test, and differential privacy protects single images only",
        )
        return
    if 0 < class_counts.num_units["test"] < MIN_UNITS:
        yield Finding(
            "look",
            "counts",
            f"{format_count(class_counts.num_units['test'], class_counts.unit)} in the test split, fewer than {MIN_UNITS}",
            "assign more to the test split if you have more: scores on so few have no confidence interval",
        )
    if 0 < class_counts.num_units["train"] < MIN_UNITS:
        yield Finding(
            "look",
            "counts",
            f"{format_count(class_counts.num_units['train'], class_counts.unit)} in the training split, fewer than {MIN_UNITS}",
            "a study with differential privacy learns little here: the noise that protects so few hides most of the signal",
        )


def _select_classes(class_counts: ClassCounts, is_chosen: Sequence[bool]) -> list[str]:
    return [name for name, chosen in zip(class_counts.classes, is_chosen, strict=True) if chosen]
