"""Splits overlapping cells with a single peak in the distance transform: cuts from notch to notch of the outline."""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.illumination import BinaryMask

MIN_NOTCH_DEPTH = 0.035  # in diameters; shallower dents belong to one cell
MIN_LONE_NOTCH_DEPTH = 0.10  # in diameters, of a notch without an opposite one
AREA_RANGE = (1.3, 1.6)  # in cell areas: regions are split from the lower end on ...
MAX_SOLIDITY_RANGE = (0.945, 0.98)  # ... if their solidity is at most this, interpolated over AREA_RANGE
MIN_PART_AREA = 0.3  # of each part, in cell areas


def split_at_notches(mask: BinaryMask, diameter: float) -> list[BinaryMask]:
    """The parts of one region (same shape as `mask`), or the region itself if there is nothing to cut."""
    cell_area = math.pi / 4 * diameter**2
    relative_area = float(mask.sum()) / cell_area
    if relative_area < AREA_RANGE[0]:
        return [mask]
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    outline = max(contours, key=cv2.contourArea)
    hull = cv2.convexHull(outline)
    if cv2.contourArea(outline) > np.interp(relative_area, AREA_RANGE, MAX_SOLIDITY_RANGE) * cv2.contourArea(hull):
        return [mask]
    for a, b in _candidate_cuts(outline, diameter):
        parts = _split_along(mask, a, b)
        if len(parts) > 1 and min(int(part.sum()) for part in parts) > MIN_PART_AREA * cell_area:
            return [piece for part in parts for piece in split_at_notches(part, diameter)]
    return [mask]


ContourPoint = NDArray[np.int32]  # (2,): x, y


def _candidate_cuts(outline: NDArray[np.int32], diameter: float) -> list[tuple[ContourPoint, ContourPoint]]:
    """Candidate cuts, best first: short lines between deep notches."""
    points = outline.reshape(-1, 2)
    hull = np.sort(cv2.convexHull(outline, returnPoints=False).reshape(-1))  # OpenCV 4 and 5 differ in shapes
    defects = cv2.convexityDefects(outline, hull) if len(hull) > 3 else None
    if defects is None:
        return []
    notches = [
        (int(far), depth / 256)
        for _, _, far, depth in defects.reshape(-1, 4).tolist()
        if depth / 256 > MIN_NOTCH_DEPTH * diameter
    ]
    cuts = []
    for i, (far, depth) in enumerate(notches):
        for other, other_depth in notches[i + 1 :]:
            length = float(np.hypot(*(points[far] - points[other])))
            cuts.append((length - 1.5 * (depth + other_depth), length, far, other))
        if depth > MIN_LONE_NOTCH_DEPTH * diameter:
            index_distance = np.abs(np.arange(len(points)) - far)
            is_opposite = np.minimum(index_distance, len(points) - index_distance) > 0.25 * len(points)
            lengths = np.where(is_opposite, np.hypot(*(points - points[far]).T), np.inf)
            other = int(np.argmin(lengths))
            cuts.append((float(lengths[other]) - 1.5 * depth, float(lengths[other]), far, other))
    return [(points[a], points[b]) for _, length, a, b in sorted(cuts) if length < 1.05 * diameter]


def _split_along(mask: BinaryMask, a: ContourPoint, b: ContourPoint) -> list[BinaryMask]:
    cut_mask = mask.copy()
    cv2.line(cut_mask, a.tolist(), b.tolist(), 0, 1)
    count, labels = cv2.connectedComponents(cut_mask, connectivity=4, ltype=cv2.CV_16U)
    if count < 3:
        return [mask]
    labels = np.where(labels > 0, labels, cv2.dilate(labels, np.ones((3, 3), np.uint8))) * mask
    sizes = np.bincount(labels.ravel(), minlength=count)[1:]
    largest_labels = 1 + np.argsort(-sizes, kind="stable")[:2]  # drops crumbs along the cut
    return [(labels == label).astype(np.uint8) for label in sorted(largest_labels.tolist())]
