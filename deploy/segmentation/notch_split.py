"""Overlapping cells whose distance map has one top only: cut from notch to notch of their common outline."""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.illumination import Mask

NOTCH = 0.035  # of a diameter: a shallower dent is a cell's own
LONE = 0.10  # a notch that has no partner must be so deep
LARGE = (1.3, 1.6)  # cells' areas: only what is larger than a cell is cut ...
SOLID = (0.945, 0.98)  # ... and not so convex
LEAST = 0.3  # of a cell's area: no part is smaller


def cut(mask: Mask, diameter: float) -> list[Mask]:
    """The parts of one region (same shape as `mask`); the region itself where there is nothing to cut."""
    whole = math.pi / 4 * diameter**2
    area = float(mask.sum()) / whole
    if area < LARGE[0]:
        return [mask]
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    outline = max(contours, key=cv2.contourArea)
    hull = cv2.convexHull(outline)
    if cv2.contourArea(outline) > np.interp(area, LARGE, SOLID) * cv2.contourArea(hull):
        return [mask]
    for a, b in _lines(outline, diameter):
        parts = _parts(mask, a, b)
        if len(parts) > 1 and min(int(part.sum()) for part in parts) > LEAST * whole:
            return [piece for part in parts for piece in cut(part, diameter)]
    return [mask]


Point = NDArray[np.int32]  # (2,): x, y


def _lines(outline: NDArray[np.int32], diameter: float) -> list[tuple[Point, Point]]:
    """Where to cut, best first: short lines between deep notches."""
    points = outline.reshape(-1, 2)
    hull = np.sort(cv2.convexHull(outline, returnPoints=False).reshape(-1))  # OpenCV 4 and 5 differ in shapes
    defects = cv2.convexityDefects(outline, hull) if len(hull) > 3 else None
    if defects is None:
        return []
    notches = [
        (int(far), depth / 256)
        for _, _, far, depth in defects.reshape(-1, 4).tolist()
        if depth / 256 > NOTCH * diameter
    ]
    lines = []
    for i, (far, depth) in enumerate(notches):
        for other, deep in notches[i + 1 :]:
            length = float(np.hypot(*(points[far] - points[other])))
            lines.append((length - 1.5 * (depth + deep), length, far, other))
        if depth > LONE * diameter:
            away = np.abs(np.arange(len(points)) - far)
            opposite = np.minimum(away, len(points) - away) > 0.25 * len(points)
            length_to = np.where(opposite, np.hypot(*(points - points[far]).T), np.inf)
            other = int(np.argmin(length_to))
            lines.append((float(length_to[other]) - 1.5 * depth, float(length_to[other]), far, other))
    return [(points[a], points[b]) for _, length, a, b in sorted(lines) if length < 1.05 * diameter]


def _parts(mask: Mask, a: Point, b: Point) -> list[Mask]:
    scored = mask.copy()
    cv2.line(scored, a.tolist(), b.tolist(), 0, 1)
    count, labels = cv2.connectedComponents(scored, connectivity=4, ltype=cv2.CV_16U)
    if count < 3:
        return [mask]
    labels = np.where(labels > 0, labels, cv2.dilate(labels, np.ones((3, 3), np.uint8))) * mask
    sizes = np.bincount(labels.ravel(), minlength=count)[1:]
    large = 1 + np.argsort(-sizes, kind="stable")[:2]  # crumbs beside the line go with nothing
    return [(labels == name).astype(np.uint8) for name in sorted(large.tolist())]
