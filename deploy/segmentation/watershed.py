"""Assigns each pixel to a cell: distance transform, watershed, and merging of parts of one cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.foreground import disk_kernel
from deploy.segmentation.illumination import BinaryMask, FloatImage
from deploy.segmentation.notch_split import split_at_notches
from pipeline.core.errors import DataError

LabelImage = NDArray[np.int32]  # (H, W): 0 background, then 1, 2, ...
WATERSHED_STEP_PX = 0.7  # of distance between two levels of the watershed


@dataclass(frozen=True)
class RegionMask:
    x: int  # of the mask's upper left corner
    y: int
    mask: BinaryMask  # (h, w), as small as possible


def split_touching_cells(mask: BinaryMask, diameter: float) -> tuple[RegionMask, ...]:
    """Splits touching cells at their necks."""
    distance = cv2.GaussianBlur(cv2.distanceTransform(mask, cv2.DIST_L2, 5), (0, 0), 0.03 * diameter) * mask
    peaks = (distance >= cv2.dilate(distance, disk_kernel(0.1 * diameter)) - 1e-3) & (distance > 0.04 * diameter)
    _, seeds = cv2.connectedComponents(peaks.astype(np.uint8), connectivity=8)
    if seeds.max() > np.iinfo(np.int16).max:  # OpenCV dilates no wider integers
        raise DataError("more than 32,767 cells in one field; cut it into tiles")
    labels = _watershed(seeds.astype(np.int16), distance, mask).astype(np.int32)
    return _extract_regions(merge_oversegmented(labels, distance, diameter), diameter)


def measure_contact_fractions(regions: Sequence[RegionMask], shape: tuple[int, ...]) -> list[float]:
    """The fraction of each region's outline that touches other regions; `shape`: of the image."""
    label_image = np.zeros((shape[0] + 2, shape[1] + 2), np.int32)  # with an empty rim
    for label, r in enumerate(regions, start=1):
        h, w = r.mask.shape
        label_image[r.y + 1 : r.y + 1 + h, r.x + 1 : r.x + 1 + w][r.mask > 0] = label
    fractions = []
    for label, r in enumerate(regions, start=1):
        h, w = r.mask.shape
        mask = cv2.copyMakeBorder(r.mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT)
        around = label_image[r.y : r.y + h + 2, r.x : r.x + w + 2][
            (cv2.dilate(mask, np.ones((3, 3), np.uint8)) > 0) & (mask == 0)
        ]
        fractions.append(float(((around > 0) & (around != label)).mean()))
    return fractions


def _extract_regions(labels: LabelImage, diameter: float) -> tuple[RegionMask, ...]:
    """Each cell with its holes filled, split at remaining notches."""
    regions = []
    for label, hull in enumerate(_convex_hulls(labels, int(labels.max()) + 1)):
        if label == 0 or len(hull) == 0:
            continue
        x, y, w, h = cv2.boundingRect(hull)
        contours, _ = cv2.findContours(
            (labels[y : y + h, x : x + w] == label).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
        )
        patch = np.zeros((h, w), np.uint8)
        cv2.drawContours(patch, [max(contours, key=cv2.contourArea)], 0, 1, cv2.FILLED)
        for part in split_at_notches(patch, diameter):
            left, top, width, height = cv2.boundingRect(part)
            regions.append(RegionMask(x + left, y + top, part[top : top + height, left : left + width]))
    return tuple(regions)


def _watershed(seeds: NDArray[np.int16], distance: FloatImage, mask: BinaryMask) -> NDArray[np.int16]:
    """Watershed: seeds grow downhill level by level. OpenCV's own orders by gray differences instead of height."""
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    labels = seeds.copy()
    depth = np.where(mask > 0, distance, -1)
    for level in [*np.arange(float(distance.max()), 0, -WATERSHED_STEP_PX), 0.0, 0.0]:
        for _ in range(2):
            labels = cv2.copyTo(cv2.dilate(labels, cross), ((depth >= level) & (labels == 0)).view(np.uint8), labels)
    return labels


def merge_oversegmented(labels: LabelImage, distance: FloatImage, diameter: float) -> LabelImage:
    """Merges parts if the neck between them is too wide for two cells."""
    count = int(labels.max()) + 1
    cell_area = math.pi / 4 * diameter**2
    relative_area = np.bincount(labels.ravel(), minlength=count) / cell_area
    peak_distance = _peak_distances(labels, distance, count)
    neck_widths = _neck_widths(labels, distance)
    merged_labels = list(range(count))
    hulls = _convex_hulls(labels, count)

    def neck_excess(a: int, b: int) -> float:
        """Positive if both parts are one cell."""
        combined_area = float(relative_area[a] + relative_area[b])
        # below 0.9 of a cell the hull is ignored
        solidity = (
            combined_area * cell_area / _hull_area(np.concatenate([hulls[a], hulls[b]])) if combined_area > 0.9 else 1.0
        )
        return neck_widths[a, b] / float(min(peak_distance[a], peak_distance[b])) - _required_neck_ratio(
            combined_area, solidity
        )

    scores = {pair: neck_excess(*pair) for pair in neck_widths}
    while scores and max(scores.values()) > 0:
        a, b = max(scores, key=lambda pair: (scores[pair], pair))
        relative_area[a] += relative_area[b]
        peak_distance[a] = max(peak_distance[a], peak_distance[b])
        hulls[a] = cv2.convexHull(np.concatenate([hulls[a], hulls[b]]))
        merged_labels = [a if n == b else n for n in merged_labels]
        changed = [pair for pair in scores if a in pair or b in pair]
        for pair in changed:
            del scores[pair]
            neck_width = neck_widths.pop(pair)
            c, d = sorted(a if n == b else n for n in pair)
            if c != d:
                neck_widths[c, d] = max(neck_width, neck_widths.get((c, d), 0.0))
        scores |= {pair: neck_excess(*pair) for pair in neck_widths if a in pair}
    return np.array(merged_labels, np.int32)[labels]


def _required_neck_ratio(relative_area: float, solidity: float) -> float:
    """Neck width, relative to the narrower part, from which two parts with this combined area are one cell.

    A single cell is round, so a large region with a waist is two cells.
    """
    waist_penalty = float(np.interp(relative_area, (0.9, 1.4), (0, 2))) * (0.955 - solidity)
    return float(np.interp(relative_area, (0.8, 1.6), (0.6, 0.9))) + waist_penalty


def _peak_distances(labels: LabelImage, distance: FloatImage, count: int) -> NDArray[np.float32]:
    is_labeled = labels > 0
    peak_distance = np.zeros(count, np.float32)
    np.maximum.at(peak_distance, labels[is_labeled], distance[is_labeled])
    return peak_distance


def _convex_hulls(labels: LabelImage, count: int) -> list[NDArray[np.int32]]:
    """The corners (k, 1, 2) of each label's convex hull, computed from the ends of its runs in the rows."""
    flat = np.pad(labels, ((0, 0), (1, 1))).ravel()
    y, x = np.divmod(
        np.flatnonzero(flat[1:] != flat[:-1]), labels.shape[1] + 2
    )  # between x and x + 1 of the padded row
    before, after = labels[y, np.maximum(x - 1, 0)], labels[y, np.minimum(x, labels.shape[1] - 1)]
    run_labels = np.concatenate([np.where(x > 0, before, 0), np.where(x < labels.shape[1], after, 0)])
    points = np.stack([np.concatenate([x - 1, x]), np.concatenate([y, y])], 1).astype(np.int32)
    order = np.argsort(run_labels, kind="stable")
    ends = np.cumsum(np.bincount(run_labels, minlength=count))
    return [cv2.convexHull(p) if len(p) else p[:, None] for p in np.split(points[order], ends[:-1])]


def _hull_area(points: NDArray[np.int32]) -> float:
    """Area of the hull in whole pixels; OpenCV's hull goes through pixel centers."""
    hull = cv2.convexHull(points)
    return float(cv2.contourArea(hull) + cv2.arcLength(hull, True) / 2 + 1)


def _neck_widths(labels: LabelImage, distance: FloatImage) -> dict[tuple[int, int], float]:
    """The largest distance value along the boundary of each pair of touching parts."""
    neck_widths: dict[tuple[int, int], float] = {}
    for one, two in (((slice(1, None),), (slice(-1),)), ((slice(None), slice(1, None)), (slice(None), slice(-1)))):
        a, b = labels[one], labels[two]
        is_boundary = (a != b) & (a > 0) & (b > 0)
        width = np.minimum(distance[one][is_boundary], distance[two][is_boundary])
        low, top = np.minimum(a[is_boundary], b[is_boundary]), np.maximum(a[is_boundary], b[is_boundary])
        for c, d, w in zip(low.tolist(), top.tolist(), width.tolist(), strict=True):
            neck_widths[c, d] = max(w, neck_widths.get((c, d), 0.0))
    return neck_widths
