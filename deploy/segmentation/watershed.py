"""Which cell each pixel belongs to: distance transform, watershed, and parts of one cell joined again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.foreground import disc
from deploy.segmentation.illumination import Mask, Plane
from deploy.segmentation.notch_split import cut
from pipeline.core.errors import BadData

Labels = NDArray[np.int32]  # (H, W): 0 glass, then 1, 2, ...
STEP = 0.7  # pixels of distance between two levels of the watershed


@dataclass(frozen=True)
class Region:
    x: int  # of the mask's upper left corner
    y: int
    mask: Mask  # (h, w), as small as possible


def split(mask: Mask, diameter: float) -> tuple[Region, ...]:
    """Touching cells cut apart at their necks."""
    distance = cv2.GaussianBlur(cv2.distanceTransform(mask, cv2.DIST_L2, 5), (0, 0), 0.03 * diameter) * mask
    tops = (distance >= cv2.dilate(distance, disc(0.1 * diameter)) - 1e-3) & (distance > 0.04 * diameter)
    _, seeds = cv2.connectedComponents(tops.astype(np.uint8), connectivity=8)
    if seeds.max() > np.iinfo(np.int16).max:  # OpenCV grows no wider numbers
        raise BadData("more than 32,767 cells in one field; cut it into tiles")
    parts = _flooded(seeds.astype(np.int16), distance, mask).astype(np.int32)
    return _finished(merged(parts, distance, diameter), diameter)


def pressed(regions: Sequence[Region], shape: tuple[int, ...]) -> list[float]:
    """Of each region, the share of its outline that lies against others; `shape`: of the plane they lie in."""
    owner = np.zeros((shape[0] + 2, shape[1] + 2), np.int32)  # a rim of nobody's
    for number, r in enumerate(regions, start=1):
        h, w = r.mask.shape
        owner[r.y + 1 : r.y + 1 + h, r.x + 1 : r.x + 1 + w][r.mask > 0] = number
    shares = []
    for number, r in enumerate(regions, start=1):
        h, w = r.mask.shape
        mask = cv2.copyMakeBorder(r.mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT)
        around = owner[r.y : r.y + h + 2, r.x : r.x + w + 2][
            (cv2.dilate(mask, np.ones((3, 3), np.uint8)) > 0) & (mask == 0)
        ]
        shares.append(float(((around > 0) & (around != number)).mean()))
    return shares


def _finished(labels: Labels, diameter: float) -> tuple[Region, ...]:
    """Every cell without holes; what still has notches cut."""
    found = []
    for name, hull in enumerate(_hulls(labels, int(labels.max()) + 1)):
        if name == 0 or len(hull) == 0:
            continue
        x, y, w, h = cv2.boundingRect(hull)
        contours, _ = cv2.findContours(
            (labels[y : y + h, x : x + w] == name).astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE
        )
        patch = np.zeros((h, w), np.uint8)
        cv2.drawContours(patch, [max(contours, key=cv2.contourArea)], 0, 1, cv2.FILLED)
        for part in cut(patch, diameter):
            left, top, wide, high = cv2.boundingRect(part)
            found.append(Region(x + left, y + top, part[top : top + high, left : left + wide]))
    return tuple(found)


def _flooded(seeds: NDArray[np.int16], distance: Plane, mask: Mask) -> NDArray[np.int16]:
    """A watershed: seeds grow downhill, a level at a time. OpenCV's own goes by grey steps, not by height."""
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    labels = seeds.copy()
    depth = np.where(mask > 0, distance, -1)
    for level in [*np.arange(float(distance.max()), 0, -STEP), 0.0, 0.0]:
        for _ in range(2):
            labels = cv2.copyTo(cv2.dilate(labels, cross), ((depth >= level) & (labels == 0)).view(np.uint8), labels)
    return labels


def merged(labels: Labels, distance: Plane, diameter: float) -> Labels:
    """Parts joined again where the neck between them is too wide for two cells."""
    count = int(labels.max()) + 1
    whole = math.pi / 4 * diameter**2
    area = np.bincount(labels.ravel(), minlength=count) / whole
    peak = _peaks(labels, distance, count)
    necks = _necks(labels, distance)
    name = list(range(count))
    hull = _hulls(labels, count)

    def wide(a: int, b: int) -> float:
        """Above 0: one cell."""
        together = float(area[a] + area[b])
        # below 0.9 of a cell the hull has no say
        solid = together * whole / _hull_area(np.concatenate([hull[a], hull[b]])) if together > 0.9 else 1.0
        return necks[a, b] / float(min(peak[a], peak[b])) - _needed(together, solid)

    scores = {pair: wide(*pair) for pair in necks}
    while scores and max(scores.values()) > 0:
        a, b = max(scores, key=lambda pair: (scores[pair], pair))
        area[a] += area[b]
        peak[a] = max(peak[a], peak[b])
        hull[a] = cv2.convexHull(np.concatenate([hull[a], hull[b]]))
        name = [a if n == b else n for n in name]
        changed = [pair for pair in scores if a in pair or b in pair]
        for pair in changed:
            del scores[pair]
            neck = necks.pop(pair)
            c, d = sorted(a if n == b else n for n in pair)
            if c != d:
                necks[c, d] = max(neck, necks.get((c, d), 0.0))
        scores |= {pair: wide(*pair) for pair in necks if a in pair}
    return np.array(name, np.int32)[labels]


def _needed(area: float, solid: float) -> float:
    """How wide a neck, against the narrower part, makes one cell of two parts that together have this area.

    A large cell is round: what is large and has a waist is two.
    """
    waist = float(np.interp(area, (0.9, 1.4), (0, 2))) * (0.955 - solid)
    return float(np.interp(area, (0.8, 1.6), (0.6, 0.9))) + waist


def _peaks(labels: Labels, distance: Plane, count: int) -> NDArray[np.float32]:
    inside = labels > 0
    peak = np.zeros(count, np.float32)
    np.maximum.at(peak, labels[inside], distance[inside])
    return peak


def _hulls(labels: Labels, count: int) -> list[NDArray[np.int32]]:
    """The corners (k, 1, 2) of each label's convex hull, found from the ends of its runs in the rows."""
    flat = np.pad(labels, ((0, 0), (1, 1))).ravel()
    y, x = np.divmod(
        np.flatnonzero(flat[1:] != flat[:-1]), labels.shape[1] + 2
    )  # between x and x + 1 of the padded row
    before, after = labels[y, np.maximum(x - 1, 0)], labels[y, np.minimum(x, labels.shape[1] - 1)]
    names = np.concatenate([np.where(x > 0, before, 0), np.where(x < labels.shape[1], after, 0)])
    points = np.stack([np.concatenate([x - 1, x]), np.concatenate([y, y])], 1).astype(np.int32)
    order = np.argsort(names, kind="stable")
    ends = np.cumsum(np.bincount(names, minlength=count))
    return [cv2.convexHull(p) if len(p) else p[:, None] for p in np.split(points[order], ends[:-1])]


def _hull_area(points: NDArray[np.int32]) -> float:
    """Of whole pixels: the hull goes through their middles."""
    hull = cv2.convexHull(points)
    return float(cv2.contourArea(hull) + cv2.arcLength(hull, True) / 2 + 1)


def _necks(labels: Labels, distance: Plane) -> dict[tuple[int, int], float]:
    """The widest place of the line between each two parts that touch."""
    necks: dict[tuple[int, int], float] = {}
    for one, two in (((slice(1, None),), (slice(-1),)), ((slice(None), slice(1, None)), (slice(None), slice(-1)))):
        a, b = labels[one], labels[two]
        edge = (a != b) & (a > 0) & (b > 0)
        width = np.minimum(distance[one][edge], distance[two][edge])
        low, top = np.minimum(a[edge], b[edge]), np.maximum(a[edge], b[edge])
        for c, d, w in zip(low.tolist(), top.tolist(), width.tolist(), strict=True):
            necks[c, d] = max(w, necks.get((c, d), 0.0))
    return necks
