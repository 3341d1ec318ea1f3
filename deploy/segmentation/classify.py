"""Classifies each region by its size, outline and color relative to the field's red cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.foreground import compute_solidity, typical_area
from deploy.segmentation.illumination import OpticalDensityImage
from deploy.segmentation.watershed import RegionMask

RegionKind = Literal["red", "white", "platelet", "clump", "border", "debris"]

# areas are multiples of a red cell's area, darkness is a multiple of a red cell's
MAX_DEBRIS_AREA = 0.12  # smaller regions are debris unless purple; the smallest labelled fragments are twice as large
MAX_PLATELET_AREA = 0.35
MIN_WHITE_CELL_AREA = 1.25
MIN_HALF_WIDTH = 0.045  # in diameters: narrower regions are scale bars
MIN_PURPLE_TONE = 0.085  # see `_purple_tone`
MIN_NUCLEUS_DARKNESS = 1.3  # purple and so dark: a white cell's nucleus, even if it was split into lobes
# smaller and with a larger part of its outline against other regions: a part of overlapping cells
MAX_FRAGMENT_AREA, MIN_FRAGMENT_CONTACT = 0.65, 0.3
MAX_CELL_DARKNESS = 2.2  # darker regions are dirt or hairs


@dataclass(frozen=True)
class RegionProperties:
    """One region's measures, in pixels and optical density."""

    area: float
    solidity: float  # area / area of the convex hull
    half_width: float  # largest distance to the outline
    density: float
    tone: float  # see `_purple_tone`
    touches_border: bool  # cut by the image's edge
    contact_fraction: float  # fraction of the outline that touches other regions


def measure_region(
    region: RegionMask, od_image: OpticalDensityImage, contact_fraction: float = 0.0
) -> RegionProperties:
    h, w = region.mask.shape
    height, width = od_image.signal.shape
    inside = region.mask > 0
    window = slice(region.y, region.y + h), slice(region.x, region.x + w)
    mean_density = od_image.density[window][inside].mean(0)
    contours, _ = cv2.findContours(region.mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    outline = max(contours, key=cv2.contourArea)
    edge_distance = cv2.distanceTransform(
        cv2.copyMakeBorder(region.mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT), cv2.DIST_L2, 3
    )
    touches_border = region.x <= 0 or region.y <= 0 or region.x + w >= width or region.y + h >= height
    solidity = compute_solidity(outline, cv2.contourArea(outline))
    density = float(od_image.signal[window][inside].mean())
    return RegionProperties(
        area=float(inside.sum()),
        solidity=solidity,
        half_width=float(edge_distance.max()),
        density=density,
        tone=_purple_tone(mean_density),
        touches_border=touches_border,
        contact_fraction=contact_fraction,
    )


def _purple_tone(mean_density: NDArray[np.float32]) -> float:
    """(red - blue) / total optical density: purple stain absorbs red and passes blue, hemoglobin the opposite."""
    return float((mean_density[0] - mean_density[2]) / max(float(np.abs(mean_density).sum()), 1e-3))


def classify_regions(
    properties: Sequence[RegionProperties], expected_diameter: float
) -> tuple[list[RegionKind], float]:
    """Each region's kind, and the diameter of the field's single red cells; `expected_diameter`: a first estimate in px."""
    expected_area = math.pi / 4 * expected_diameter**2
    single_cells = [
        t
        for t in properties
        if not t.touches_border and t.solidity > 0.88 and 0.25 * expected_area < t.area < 1.8 * expected_area
    ] or list(properties)
    cell_area = typical_area(np.array([t.area for t in single_cells]))
    diameter = 2 * math.sqrt(cell_area / math.pi)
    typical_tone = float(np.median([t.tone for t in single_cells]))
    typical_density = float(np.median([t.density for t in single_cells]))
    return [
        _classify_region(t, t.area / cell_area, t.tone - typical_tone, t.density / typical_density, diameter)
        for t in properties
    ], diameter


def _classify_region(
    properties: RegionProperties, relative_area: float, purpleness: float, relative_density: float, diameter: float
) -> RegionKind:
    # absolute tone too: hairs are gray, which is purple relative to pale cells
    is_blue = purpleness > 1.5 * MIN_PURPLE_TONE and properties.tone > 0.02
    if properties.half_width < MIN_HALF_WIDTH * diameter:
        return "debris"
    # a clump of platelets has neither hemoglobin nor a nucleus
    is_platelet_clump = is_blue and relative_area < MIN_WHITE_CELL_AREA and relative_density < MIN_NUCLEUS_DARKNESS
    if (
        purpleness > MIN_PURPLE_TONE
        and not properties.touches_border
        and (relative_area < MAX_PLATELET_AREA or is_platelet_clump)
    ):
        return "platelet"
    if relative_area < MAX_DEBRIS_AREA or relative_density > (2 * MAX_CELL_DARKNESS if is_blue else MAX_CELL_DARKNESS):
        return "debris"
    if properties.touches_border:
        return "border"
    if purpleness > MIN_PURPLE_TONE and (
        relative_area > MIN_WHITE_CELL_AREA or (is_blue and relative_density > MIN_NUCLEUS_DARKNESS)
    ):
        return "white"
    if (
        relative_area > 2.4
        or (relative_area > 1.7 and properties.solidity < 0.9)
        or (relative_area < MAX_FRAGMENT_AREA and properties.contact_fraction > MIN_FRAGMENT_CONTACT)
    ):
        return "clump"
    return "red"
