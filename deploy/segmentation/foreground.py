"""Separates cells from the background by a threshold, fills central pallor, and estimates the cells' diameter."""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.illumination import BinaryMask, FloatImage, OpticalDensityImage

# densities are multiples of the background's noise (SNR) or of a typical cell's density
MIN_PIXEL_SNR = 3.5  # of a dark pixel
MIN_TYPICAL_SNR = 5.0  # of the median dark pixel, ...
MIN_DARK_FRACTION = 0.01  # ... or this fraction of the field is dark; otherwise it is noise
MIN_OUTLINE_SNR = 2.0  # lower bound of the outline's threshold
OUTLINE_FRACTION = 0.3  # of a typical cell's density: the outline's threshold
MIN_PALLOR_CONVEXITY = 0.9  # solidity minus corner excess of a hole that is pallor
MIN_PALLOR_DENSITY = 0.25  # of a typical cell's density: paler pixels are background


def segment_foreground(
    od_image: OpticalDensityImage, outline_fraction: float = OUTLINE_FRACTION
) -> tuple[BinaryMask, float]:
    """Pixels darker than `outline_fraction` of a typical cell, and a cell's typical density (0: no cells)."""
    dark_pixels = od_image.signal[od_image.signal > MIN_PIXEL_SNR * od_image.noise]
    typical_density = float(np.median(dark_pixels)) if dark_pixels.size > 12 else 0.0
    if (
        typical_density < MIN_TYPICAL_SNR * od_image.noise
        and dark_pixels.size < MIN_DARK_FRACTION * od_image.signal.size
    ):
        return np.zeros(od_image.signal.shape, np.uint8), 0.0
    return (od_image.signal > max(MIN_OUTLINE_SNR * od_image.noise, outline_fraction * typical_density)).astype(
        np.uint8
    ), typical_density


def fill_pallor(mask: BinaryMask, signal: FloatImage, typical_density: float, diameter: float | None) -> BinaryMask:
    """Fills pallor but not gaps between touching cells, which are background with inward corners.

    With a known `diameter` it also closes small breaks in the rims.
    """
    cell_area = math.pi / 4 * diameter**2 if diameter else math.inf
    filled_mask = mask | _find_pallor(mask, signal, typical_density, cell_area)
    if not diameter:
        return filled_mask
    closed = cv2.morphologyEx(filled_mask, cv2.MORPH_CLOSE, disk_kernel(0.08 * diameter))
    filled_mask |= closed & (signal > MIN_PALLOR_DENSITY * typical_density)
    holes = _find_pallor(
        closed, signal, typical_density, cell_area, check_shape=False
    )  # closing has rounded the corners
    filled_mask |= holes | (closed & cv2.dilate(holes, disk_kernel(0.1 * diameter)))
    return filled_mask | _find_pallor(filled_mask, signal, typical_density, cell_area, check_shape=False)


def _find_pallor(
    mask: BinaryMask, signal: FloatImage, typical_density: float, cell_area: float, check_shape: bool = True
) -> BinaryMask:
    """Holes inside cells of about the area `cell_area`."""
    holes = np.zeros_like(mask)
    contours, hierarchy = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    areas = [cv2.contourArea(contour) for contour in contours]
    for contour, area, (_, _, _, parent) in zip(
        contours, areas, hierarchy[0] if hierarchy is not None else (), strict=True
    ):
        if parent < 0 or area > 0.5 * cell_area:
            continue
        is_inside_cell = area < 0.02 * cell_area or areas[parent] < 1.6 * cell_area  # a single cell has no gaps
        if area < 12 or (is_inside_cell and cell_area < math.inf):
            cv2.drawContours(holes, [contour], 0, 1, cv2.FILLED)
            continue
        x, y, w, h = cv2.boundingRect(contour)
        patch = np.zeros((h, w), np.uint8)
        cv2.drawContours(patch, [contour], 0, 1, cv2.FILLED, offset=(-x, -y))
        window = slice(y, y + h), slice(x, x + w)
        relative_density = float(signal[window][(patch > 0) & (mask[window] == 0)].mean()) / typical_density
        if relative_density > 0.35 or (
            check_shape
            and compute_solidity(contour, area) - _corner_excess(contour, area) + 0.4 * relative_density
            > MIN_PALLOR_CONVEXITY
        ):
            holes[window] |= patch
    return holes


def _corner_excess(contour: NDArray[np.int32], area: float) -> float:
    """0 for an ellipse, 0.05 for a square, 0.2 for a triangle, more for concave sides as between round cells."""
    m = cv2.moments(contour)
    return float(4 * math.pi * math.sqrt(max(m["mu20"] * m["mu02"] - m["mu11"] ** 2, 0.0)) / area**2) - 1


def compute_solidity(contour: NDArray[np.int32], area: float) -> float:
    """Area / area of the convex hull."""
    return area / max(cv2.contourArea(cv2.convexHull(contour)), 1.0)


def estimate_diameter(od_image: OpticalDensityImage) -> float:
    """Typical diameter of a cell in the field (0: no cells).

    Single cells are convex. Faint rims need a low threshold, crowded fields a high one: the threshold with the largest
    area of single cells is used. In a crowd with hardly any single cell, peaks of the distance transform are used.
    """
    best_areas: list[float] = []
    for outline_fraction in (0.3, 0.42, 0.54):
        mask, typical_density = segment_foreground(od_image, outline_fraction)
        if not typical_density:
            return 0.0
        mask = fill_pallor(mask, od_image.signal, typical_density, None)
        areas = _single_cell_areas(mask)
        if sum(areas) > 1.05 * sum(best_areas):
            best_areas = areas
    if sum(best_areas) > 0.1 * float(mask.sum()):
        return 2 * math.sqrt(typical_area(np.array(best_areas)) / math.pi)
    distance = cv2.distanceTransform(mask, cv2.DIST_L2, 5)
    peak_distances = distance[(distance == cv2.dilate(distance, np.ones((7, 7), np.uint8))) & (distance > 3)]
    return 2 * math.sqrt(typical_area(peak_distances.astype(float) ** 2)) if peak_distances.size else 0.0


def _single_cell_areas(mask: BinaryMask) -> list[float]:
    """Areas of convex regions that do not touch the image's edge."""
    height, width = mask.shape
    areas = []
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    for contour in contours:
        if len(contour) < 20:
            continue
        x, y, w, h = cv2.boundingRect(contour)
        area = cv2.contourArea(contour)
        is_inside = x > 0 and y > 0 and x + w < width and y + h < height
        if is_inside and max(w, h) < 3 * min(w, h) and compute_solidity(contour, area) > 0.9:
            areas.append(area)
    return areas


def typical_area(areas: NDArray[np.float64]) -> float:
    """The median area of the cells; first weighted by area, so that many specks have no influence."""
    ordered = np.sort(areas)
    weighted_median = ordered[np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)]
    return float(np.median(ordered[(ordered > 0.35 * weighted_median) & (ordered < 2.2 * weighted_median)]))


def disk_kernel(radius: float) -> BinaryMask:
    size = 2 * max(1, round(radius)) + 1
    return np.asarray(cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (size, size)), np.uint8)
