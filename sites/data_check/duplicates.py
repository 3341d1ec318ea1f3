"""Duplicate images: identical in every pixel, or nearly identical (saved again, brightened, resized).

Near duplicates are found by a perceptual hash of 128 bits: whether the image gets lighter to the right and downwards.
Copies differ in few bits. The bits are divided into eight bands; two images that differ in at most seven bits agree in
at least one band, so only images with an equal band are compared. Round cells have similar hashes, so the sketches of a
pair (16 x 16 pixels) must correlate too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sites.data_check.findings import Finding, ProgressCallback, format_count, ignore_progress
from sites.data_check.image_quality import ImageMeasures

MAX_HASH_DISTANCE = 7  # bits in which near duplicates may differ: one less than the number of bands
MIN_SKETCH_CORRELATION = 0.97
PAIRS_PER_BATCH = 1 << 20  # bounds memory
MAX_NEAR_PAIRS = 20_000  # the search ends here
BIT_COUNTS = np.array([bin(value).count("1") for value in range(1 << 16)], np.uint8)


@dataclass(frozen=True)
class ExampleOrigin:
    """Decides whether a duplicate does harm. (N,) each: class, split, and privacy unit (-1: unknown)."""

    y: np.ndarray
    split: np.ndarray
    unit: np.ndarray


@dataclass(frozen=True)
class DuplicateImages:
    """Groups of rows with identical pixels, and pairs of rows that are nearly identical."""

    identical_groups: tuple[tuple[int, ...], ...]
    near_pairs: np.ndarray  # (n, 2) rows

    def to_dict(self, names: Sequence[str], origin: ExampleOrigin) -> dict[str, Any]:
        return {
            "equal": [[names[row] for row in group] for group in self.identical_groups],
            "leaks": sum(_has_different_values(group, origin.split) for group in self.identical_groups),
            "label_conflicts": sum(_has_different_values(group, origin.y) for group in self.identical_groups),
            "near": [[names[int(a)], names[int(b)]] for a, b in self.near_pairs],
        }


def find_duplicates(
    measures: ImageMeasures, excluded_rows: np.ndarray, on_progress: ProgressCallback = ignore_progress
) -> DuplicateImages:
    """`excluded_rows`: blank images, which look alike without being copies."""
    candidate_rows = np.setdiff1d(np.arange(len(measures.digest)), excluded_rows)
    _, first_rows, group_index = np.unique(measures.digest[candidate_rows], return_index=True, return_inverse=True)
    order = np.argsort(group_index, kind="stable")
    group_starts = np.flatnonzero(np.diff(group_index[order])) + 1
    identical_groups = [tuple(candidate_rows[rows].tolist()) for rows in np.split(order, group_starts) if len(rows) > 1]
    near_pairs = _find_near_pairs(measures, candidate_rows[np.sort(first_rows)], on_progress)
    return DuplicateImages(tuple(sorted(identical_groups)), near_pairs)


def _find_near_pairs(measures: ImageMeasures, rows: np.ndarray, on_progress: ProgressCallback) -> np.ndarray:
    hashes, sketch = measures.perceptual_hash[rows], measures.sketch[rows].astype(np.float32)
    sketch -= sketch.mean(axis=1, keepdims=True)
    sketch /= np.linalg.norm(sketch, axis=1, keepdims=True) + 1e-6
    pairs: set[tuple[int, int]] = set()
    bands = hashes.shape[1]
    for band in range(bands):
        for a, b in _iter_equal_pairs(hashes[:, band]):
            hash_distance = BIT_COUNTS[hashes[a] ^ hashes[b]].sum(axis=1, dtype=np.uint16)
            a, b = a[hash_distance <= MAX_HASH_DISTANCE], b[hash_distance <= MAX_HASH_DISTANCE]
            is_similar = np.einsum("ij,ij->i", sketch[a], sketch[b]) >= MIN_SKETCH_CORRELATION
            pairs |= set(zip(rows[a[is_similar]].tolist(), rows[b[is_similar]].tolist(), strict=True))
            if len(pairs) >= MAX_NEAR_PAIRS:
                return np.array(sorted(pairs)[:MAX_NEAR_PAIRS])
        on_progress("comparing images", band + 1, bands)
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def _iter_equal_pairs(values: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of index pairs (a, b) with equal values, a < b, about PAIRS_PER_BATCH at a time."""
    order = np.argsort(values, kind="stable")
    ends = np.searchsorted(values[order], values[order], side="right")
    num_partners = ends - np.arange(len(order)) - 1  # later indices with the same value
    cumulative = np.concatenate([[0], np.cumsum(num_partners)])
    start = 0
    while start < len(order):
        stop = max(int(np.searchsorted(cumulative, cumulative[start] + PAIRS_PER_BATCH, side="right")) - 1, start + 1)
        repeats = num_partners[start:stop]
        a = np.repeat(np.arange(start, stop), repeats)
        b = a + 1 + np.arange(len(a)) - np.repeat(cumulative[start:stop] - cumulative[start], repeats)
        yield np.minimum(order[a], order[b]), np.maximum(order[a], order[b])
        start = stop


def _has_different_values(rows: Sequence[int], values: np.ndarray) -> bool:
    return len(set(values[list(rows)].tolist())) > 1


def find_leaking_pairs(duplicates: DuplicateImages, origin: ExampleOrigin) -> np.ndarray:
    """(n, 2): near duplicates in two splits, or of two patients (or other units)."""
    a, b = duplicates.near_pairs[:, 0], duplicates.near_pairs[:, 1]
    is_other_unit = (origin.unit[a] != origin.unit[b]) & (origin.unit[a] >= 0) & (origin.unit[b] >= 0)
    return np.asarray(duplicates.near_pairs[is_other_unit | (origin.split[a] != origin.split[b])])


def duplicate_findings(
    duplicates: DuplicateImages, origin: ExampleOrigin, display_name: Callable[[int], str]
) -> Iterator[Finding]:
    leaks = [group for group in duplicates.identical_groups if _has_different_values(group, origin.split)]
    label_conflicts = [group for group in duplicates.identical_groups if _has_different_values(group, origin.y)]

    def format_groups(groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        return tuple(" = ".join(map(display_name, group)) for group in groups)

    if leaks:
        yield Finding(
            "stop",
            "copies",
            f"{format_count(len(leaks), 'image appears', 'images appear')} in more than one split (identical pixels)",
            "delete all but one copy, or list the images in a manifest that gives all copies the same patient, slide or "
            "group: otherwise the model is tested on images that it was trained on",
            format_groups(leaks),
        )
    if label_conflicts:
        yield Finding(
            "stop",
            "copies",
            f"{format_count(len(label_conflicts), 'image appears', 'images appear')} in more than one class (identical pixels)",
            "decide which class each image shows, and delete the copy in the other class",
            format_groups(label_conflicts),
        )
    if harmless := sorted(set(duplicates.identical_groups) - {*leaks, *label_conflicts}):
        yield Finding(
            "look",
            "copies",
            f"{format_count(len(harmless), 'image appears', 'images appear')} more than once in the same split and class "
            "(identical pixels)",
            "delete all but one copy, unless the image should count several times",
            format_groups(harmless),
        )
    if len(leaking_pairs := find_leaking_pairs(duplicates, origin)):
        yield Finding(
            "look",
            "copies",
            f"{format_count(len(leaking_pairs), 'pair of images is', 'pairs of images are')} nearly identical, but in two splits "
            "or of two units",
            "look at the pairs on the page: two files of the same image or field must belong to one patient",
            format_groups(leaking_pairs.tolist()),
        )
