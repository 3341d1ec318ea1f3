"""What each region is: by its size, outline and colour against those of the field's own red cells."""

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

MAX_DEBRIS_AREA = (
    0.12  # of a red cell's area: debris, unless purple; the smallest labelled fragments are twice as large
)
MAX_PLATELET_AREA = 0.35  # platelets are smaller
MIN_WHITE_CELL_AREA = 1.25  # white cells are larger
MIN_HALF_WIDTH = 0.045  # of a diameter: half the width of a scale bar, never of a cell
MIN_PURPLE_TONE = 0.085  # see `_tone`
MIN_NUCLEUS_DARKNESS = (
    1.3  # times as dark as the red cells, and purple: a white cell's, also where it was cut into lobes
)
MAX_FRAGMENT_AREA, MIN_FRAGMENT_CONTACT = (
    0.65,
    0.3,
)  # a smaller one, with more of its outline against others: a part of overlapping cells
MAX_CELL_DARKNESS = 2.2  # times as dark as the red cells: dirt, hairs


@dataclass(frozen=True)
class RegionProperties:
    """One region's measures, in pixels and optical density."""

    area: float
    solidity: float  # area against the convex hull's
    half_width: float  # of its width, at the widest place
    density: float
    tone: float
    touches_border: bool  # cut by the image's edge
    contact_fraction: float  # share of the outline that lies against other regions


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
    """Purple swallows red and lets blue pass, haemoglobin the other way: their difference against the whole."""
    return float((mean_density[0] - mean_density[2]) / max(float(np.abs(mean_density).sum()), 1e-3))


def classify_regions(
    properties: Sequence[RegionProperties], expected_diameter: float
) -> tuple[list[RegionKind], float]:
    """A kind for each, and the diameter of the field's single red cells; `guess` is a first one, in the same pixels."""
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
    is_blue = (
        purpleness > 1.5 * MIN_PURPLE_TONE and properties.tone > 0.02
    )  # in itself, too: hairs are grey, which is purple beside pale cells
    if properties.half_width < MIN_HALF_WIDTH * diameter:
        return "debris"
    is_platelet_clump = (
        is_blue and relative_area < MIN_WHITE_CELL_AREA and relative_density < MIN_NUCLEUS_DARKNESS
    )  # platelets by the dozen: no haemoglobin, and no nucleus either
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
