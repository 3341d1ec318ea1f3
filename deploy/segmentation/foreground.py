"""Which pixels are cells: a threshold, then pallor filled; and how large a cell is."""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.illumination import Light, Mask, Plane

CLEAR = 3.5  # cells are so many times darker than the noise of the glass
SURE = 5.0  # ... and typically so many times,
MANY = 0.01  # or such a part of the field is dark: noise alone is not
FLOOR = 2.0  # an outline is never drawn fainter
EDGE = 0.3  # of a typical cell's density: where the outline is drawn
CONVEX = 0.9  # solidity, less its corners, of a hole that is pallor
TINTED = 0.25  # of it: pallor may be so pale and still is no glass


def foreground(light: Light, edge: float = EDGE) -> tuple[Mask, float]:
    """Pixels darker than `edge` times a typical cell, and the typical density of a cell (0: there is none)."""
    dark = light.signal[light.signal > CLEAR * light.noise]
    typical = float(np.median(dark)) if dark.size > 12 else 0.0
    if typical < SURE * light.noise and dark.size < MANY * light.signal.size:
        return np.zeros(light.signal.shape, np.uint8), 0.0
    return (light.signal > max(FLOOR * light.noise, edge * typical)).astype(np.uint8), typical


def filled(mask: Mask, signal: Plane, typical: float, diameter: float | None) -> Mask:
    """Pallor filled, gaps between touching cells left open: those are bare glass with inward corners.

    With a known `diameter` rims that are broken by a little are mended, too.
    """
    whole = math.pi / 4 * diameter**2 if diameter else math.inf
    full = mask | _pallor(mask, signal, typical, whole)
    if not diameter:
        return full
    closed = cv2.morphologyEx(full, cv2.MORPH_CLOSE, disc(0.08 * diameter))
    full |= closed & (signal > TINTED * typical)
    holes = _pallor(closed, signal, typical, whole, shape=False)  # closing has rounded the corners
    full |= holes | (closed & cv2.dilate(holes, disc(0.1 * diameter)))
    return full | _pallor(full, signal, typical, whole, shape=False)


def _pallor(mask: Mask, signal: Plane, typical: float, whole: float, shape: bool = True) -> Mask:
    """Holes that belong to a cell of about the area `whole`."""
    holes = np.zeros_like(mask)
    contours, tree = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    areas = [cv2.contourArea(contour) for contour in contours]
    for contour, area, (_, _, _, parent) in zip(contours, areas, tree[0] if tree is not None else (), strict=True):
        if parent < 0 or area > 0.5 * whole:
            continue
        within = area < 0.02 * whole or areas[parent] < 1.6 * whole  # one cell has no gaps
        if area < 12 or (within and whole < math.inf):
            cv2.drawContours(holes, [contour], 0, 1, cv2.FILLED)
            continue
        x, y, w, h = cv2.boundingRect(contour)
        patch = np.zeros((h, w), np.uint8)
        cv2.drawContours(patch, [contour], 0, 1, cv2.FILLED, offset=(-x, -y))
        window = slice(y, y + h), slice(x, x + w)
        tint = float(signal[window][(patch > 0) & (mask[window] == 0)].mean()) / typical
        if tint > 0.35 or (shape and solidity(contour, area) - _corners(contour, area) + 0.4 * tint > CONVEX):
            holes[window] |= patch
    return holes


def _corners(contour: NDArray[np.int32], area: float) -> float:
    """0 for an ellipse, 0.05 for a square, 0.2 for a triangle, more with hollow sides, such as round cells leave."""
    m = cv2.moments(contour)
    return float(4 * math.pi * math.sqrt(max(m["mu20"] * m["mu02"] - m["mu11"] ** 2, 0.0)) / area**2) - 1


def solidity(contour: NDArray[np.int32], area: float) -> float:
    """Area against that of the convex hull."""
    return area / max(cv2.contourArea(cv2.convexHull(contour)), 1.0)


def guess_diameter(light: Light) -> float:
    """Typical diameter of a cell from the whole field (0: there is none).

    Single cells are convex. Faint rims want a low threshold, crowds a high one: the one that shows most single cells
    is believed. Where a crowd shows hardly any, the widest places tell.
    """
    best: list[float] = []
    for edge in (0.3, 0.42, 0.54):
        mask, typical = foreground(light, edge)
        if not typical:
            return 0.0
        mask = filled(mask, light.signal, typical, None)
        areas = _single(mask)
        if sum(areas) > 1.05 * sum(best):
            best = areas
    if sum(best) > 0.1 * float(mask.sum()):
        return 2 * math.sqrt(typical_size(np.array(best)) / math.pi)
    distance = cv2.distanceTransform(mask, cv2.DIST_L2, 5)
    widest = distance[(distance == cv2.dilate(distance, np.ones((7, 7), np.uint8))) & (distance > 3)]
    return 2 * math.sqrt(typical_size(widest.astype(float) ** 2)) if widest.size else 0.0


def _single(mask: Mask) -> list[float]:
    """Areas of convex regions that the image's edge does not cut."""
    high, wide = mask.shape
    areas = []
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    for contour in contours:
        if len(contour) < 20:
            continue
        x, y, w, h = cv2.boundingRect(contour)
        area = cv2.contourArea(contour)
        inside = x > 0 and y > 0 and x + w < wide and y + h < high
        if inside and max(w, h) < 3 * min(w, h) and solidity(contour, area) > 0.9:
            areas.append(area)
    return areas


def typical_size(areas: NDArray[np.float64]) -> float:
    """The median area of the cells; weighed by area first, so that specks, however many, have no say."""
    ordered = np.sort(areas)
    middle = ordered[np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)]
    return float(np.median(ordered[(ordered > 0.35 * middle) & (ordered < 2.2 * middle)]))


def disc(radius: float) -> Mask:
    size = 2 * max(1, round(radius)) + 1
    return np.asarray(cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (size, size)), np.uint8)
