"""The same image twice: equal in every pixel, or nearly (saved again, brightened, resized).

Near copies: 128 bits say where an image gets lighter to the right and downwards; copies differ in few of them. The bits
are cut into eight bands; two images that differ in at most seven bits agree in at least one band, so only images with an equal
band are compared. Round cells look alike to 128 bits, so a pair must also correlate as sketches of 16 x 16 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sites.data_check.findings import Finding, Tick, count, silent
from sites.data_check.image_quality import Measures

BITS = 7  # that a near copy may differ in: one less than there are bands
ALIKE = 0.97  # correlation of two sketches
AT_ONCE = 1 << 20  # pairs
MOST = 20_000  # pairs that are kept
ONES = np.array([bin(value).count("1") for value in range(1 << 16)], np.uint8)


@dataclass(frozen=True)
class Where:
    """What tells whether a copy does harm. (N,) each; unit -1: not known whose it is."""

    y: np.ndarray
    split: np.ndarray
    unit: np.ndarray


@dataclass(frozen=True)
class Copies:
    """Groups of rows that are equal in every pixel, and pairs that are nearly so."""

    equal: tuple[tuple[int, ...], ...]
    near: np.ndarray  # (n, 2) rows

    def json(self, names: Sequence[str], where: Where) -> dict[str, Any]:
        return {
            "equal": [[names[row] for row in group] for group in self.equal],
            "leaks": sum(_differ(group, where.split) for group in self.equal),
            "label_conflicts": sum(_differ(group, where.y) for group in self.equal),
            "near": [[names[int(a)], names[int(b)]] for a, b in self.near],
        }


def find_copies(measures: Measures, leave_out: np.ndarray, tick: Tick = silent) -> Copies:
    """`leave_out`: rows of blank images, of which one is like another without being a copy."""
    kept = np.setdiff1d(np.arange(len(measures.digest)), leave_out)
    _, first, group = np.unique(measures.digest[kept], return_index=True, return_inverse=True)
    order = np.argsort(group, kind="stable")
    cuts = np.flatnonzero(np.diff(group[order])) + 1
    equal = [tuple(kept[rows].tolist()) for rows in np.split(order, cuts) if len(rows) > 1]
    return Copies(tuple(sorted(equal)), _near(measures, kept[np.sort(first)], tick))


def _near(measures: Measures, rows: np.ndarray, tick: Tick) -> np.ndarray:
    hashes, sketch = measures.hash[rows], measures.sketch[rows].astype(np.float32)
    sketch -= sketch.mean(axis=1, keepdims=True)
    sketch /= np.linalg.norm(sketch, axis=1, keepdims=True) + 1e-6
    found: set[tuple[int, int]] = set()
    bands = hashes.shape[1]
    for band in range(bands):
        for a, b in _with_equal(hashes[:, band]):
            bits = ONES[hashes[a] ^ hashes[b]].sum(axis=1, dtype=np.uint16)
            a, b = a[bits <= BITS], b[bits <= BITS]
            alike = np.einsum("ij,ij->i", sketch[a], sketch[b]) >= ALIKE
            found |= set(zip(rows[a[alike]].tolist(), rows[b[alike]].tolist(), strict=True))
            if len(found) >= MOST:
                return np.array(sorted(found)[:MOST])
        tick("comparing images", band + 1, bands)
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def _with_equal(values: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of places with equal values, a before b, some AT_ONCE at a time."""
    order = np.argsort(values, kind="stable")
    ends = np.searchsorted(values[order], values[order], side="right")
    behind = ends - np.arange(len(order)) - 1  # partners further back, of each
    total = np.concatenate([[0], np.cumsum(behind)])
    start = 0
    while start < len(order):
        stop = max(int(np.searchsorted(total, total[start] + AT_ONCE, side="right")) - 1, start + 1)
        repeats = behind[start:stop]
        a = np.repeat(np.arange(start, stop), repeats)
        b = a + 1 + np.arange(len(a)) - np.repeat(total[start:stop] - total[start], repeats)
        yield np.minimum(order[a], order[b]), np.maximum(order[a], order[b])
        start = stop


def _differ(rows: Sequence[int], values: np.ndarray) -> bool:
    return len(set(values[list(rows)].tolist())) > 1


def harmful(copies: Copies, where: Where) -> np.ndarray:
    """(n, 2): near copies in two splits, or of two patients (or other units)."""
    a, b = copies.near[:, 0], copies.near[:, 1]
    apart = (where.unit[a] != where.unit[b]) & (where.unit[a] >= 0) & (where.unit[b] >= 0)
    return np.asarray(copies.near[apart | (where.split[a] != where.split[b])])


def findings(copies: Copies, where: Where, shown: Callable[[int], str]) -> Iterator[Finding]:
    leaks = [group for group in copies.equal if _differ(group, where.split)]
    conflicts = [group for group in copies.equal if _differ(group, where.y)]

    def words(groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        return tuple(" = ".join(map(shown, group)) for group in groups)

    if leaks:
        yield Finding(
            "stop", "copies", f"{count(len(leaks), 'image')} in more than one split, equal in every pixel",
            "keep one of each, or list the images in a manifest whose patient, slide or group is the same for copies: "
            "else a test asks what was learnt by heart", words(leaks),
        )  # fmt: skip
    if conflicts:
        yield Finding(
            "stop", "copies", f"{count(len(conflicts), 'image')} in more than one class, equal in every pixel",
            "decide what each shows, and remove it from the other class", words(conflicts),
        )  # fmt: skip
    if plain := sorted(set(copies.equal) - {*leaks, *conflicts}):
        yield Finding(
            "look", "copies", f"{count(len(plain), 'image')} more than once in one split and class, equal in every pixel",
            "keep one of each, unless it shall count several times", words(plain),
        )  # fmt: skip
    if len(near := harmful(copies, where)):
        yield Finding(
            "look", "copies", f"{count(len(near), 'pair')} of images nearly the same in two splits or of two units",
            "look at them on the page: one image saved twice, or one field seen twice, belongs to one patient",
            words(near.tolist()),
        )  # fmt: skip
