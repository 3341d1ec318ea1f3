"""Segments a photograph of a blood smear into cells, with NumPy and OpenCV.

Steps: correct the illumination, separate cells from the background, fill central pallor, split touching cells by
distance transform and watershed, classify each region by size and color. They run on a copy in which a red cell measures
WORKING_DIAMETER_PX pixels, so that one set of lengths fits every microscope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

from deploy.segmentation.cell_size import MAX_ESTIMATE_PIXELS, RgbImage, find_cell_diameter, scale_image
from deploy.segmentation.classify import RegionKind, classify_regions, measure_region
from deploy.segmentation.foreground import fill_pallor, segment_foreground
from deploy.segmentation.illumination import BinaryMask, FloatImage, OpticalDensityImage, correct_illumination
from deploy.segmentation.watershed import RegionMask, measure_contact_fractions, split_touching_cells

WORKING_DIAMETER_PX = 36.0
BLUR_SIGMA_DIAMETERS = 0.03  # removes camera noise but keeps the outlines
LARGE_FIELD_DIAMETERS = 24.0  # in longer fields, the illumination is fitted in blocks
BLOCK_DIAMETERS = 16.0  # a block's side, about that of an ordinary camera field
MIN_IMAGE_SIDE_PX = 12
MIN_DIAMETER_PX, MAX_DIAMETER_PX = 6.0, 600.0  # of a cell in the input image


@dataclass(frozen=True)
class CellRegion:
    """A region in pixels of the input image."""

    box: tuple[int, int, int, int]  # x0, y0, x1, y1; x1, y1 exclusive
    center: tuple[float, float]  # x, y of the box's center; crops are centered here
    area_px: float
    kind: RegionKind  # only "red" cells are counted; "border": cut by the edge; "clump": cells that could not be separated


@dataclass(frozen=True)
class SegmentationResult:
    regions: tuple[CellRegion, ...]  # in reading order
    rbc_diameter_px: float  # the given one, or the typical diameter of a single red cell; 0: no cells
    background_rgb: tuple[float, float, float]
    sharpness: float  # slope at the outlines, in typical cell densities per tenth of a diameter
    measured_diameter_px: float = 0.0  # measured if a diameter was given; 0: unknown


@dataclass(frozen=True)
class UnclassifiedRegions:
    """Regions on the working copy, which is `scale` times the input image."""

    regions: tuple[RegionMask, ...]
    od_image: OpticalDensityImage
    scale: float
    sharpness: float


def find_cells(image: RgbImage, rbc_diameter_px: float | None = None) -> SegmentationResult:
    """The cells of a field (H, W, 3) uint8 RGB; without `rbc_diameter_px` their size is estimated from the field."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(f"the image is {image.dtype} {image.shape}: give (height, width, 3) uint8, red first")
    unclassified = find_regions(image, rbc_diameter_px)
    if not unclassified.regions:
        return SegmentationResult((), rbc_diameter_px or 0.0, unclassified.od_image.background_rgb, 0.0)
    contact_fractions = measure_contact_fractions(unclassified.regions, unclassified.od_image.signal.shape)
    properties = [
        measure_region(region, unclassified.od_image, contact_fraction)
        for region, contact_fraction in zip(unclassified.regions, contact_fractions, strict=True)
    ]
    kinds, typical_diameter = classify_regions(properties, WORKING_DIAMETER_PX)
    cell_regions = [
        _to_cell_region(r, kind, unclassified.scale, image.shape)
        for r, kind in zip(unclassified.regions, kinds, strict=True)
    ]
    cell_regions.sort(key=lambda cell_region: (cell_region.box[1], cell_region.box[0], cell_region.box))
    measured_diameter_px = find_cell_diameter(image, LARGE_FIELD_DIAMETERS) if rbc_diameter_px else 0.0
    return SegmentationResult(
        tuple(cell_regions),
        rbc_diameter_px or typical_diameter / unclassified.scale,
        unclassified.od_image.background_rgb,
        unclassified.sharpness,
        measured_diameter_px,
    )


def find_regions(image: RgbImage, rbc_diameter_px: float | None = None) -> UnclassifiedRegions:
    """Regions with their masks, not yet classified."""
    height, width = image.shape[:2]
    if min(height, width) < MIN_IMAGE_SIDE_PX:
        return UnclassifiedRegions((), _empty_od_image(image), 1.0, 0.0)
    diameter_px = rbc_diameter_px or find_cell_diameter(image, LARGE_FIELD_DIAMETERS)
    if not MIN_DIAMETER_PX <= diameter_px <= MAX_DIAMETER_PX:
        return UnclassifiedRegions(
            (),
            correct_illumination(scale_image(image, min(1.0, math.sqrt(MAX_ESTIMATE_PIXELS / (height * width)))), 1.0),
            1.0,
            0.0,
        )
    scale = WORKING_DIAMETER_PX / diameter_px
    od_image = correct_illumination(
        scale_image(image, scale),
        BLUR_SIGMA_DIAMETERS * WORKING_DIAMETER_PX,
        BLOCK_DIAMETERS * WORKING_DIAMETER_PX if max(height, width) > LARGE_FIELD_DIAMETERS * diameter_px else None,
    )
    mask, typical_density = segment_foreground(od_image)
    if not typical_density:
        return UnclassifiedRegions((), od_image, scale, 0.0)
    mask = fill_pallor(mask, od_image.signal, typical_density, WORKING_DIAMETER_PX)
    return UnclassifiedRegions(
        split_touching_cells(mask, WORKING_DIAMETER_PX),
        od_image,
        scale,
        _measure_sharpness(od_image.signal, mask) / typical_density,
    )


def _to_cell_region(region: RegionMask, kind: RegionKind, scale: float, shape: tuple[int, ...]) -> CellRegion:
    h, w = region.mask.shape
    x0, y0 = max(0, round(region.x / scale)), max(0, round(region.y / scale))
    x1, y1 = min(shape[1], round((region.x + w) / scale)), min(shape[0], round((region.y + h) / scale))
    return CellRegion((x0, y0, x1, y1), ((x0 + x1) / 2, (y0 + y1) / 2), float(region.mask.sum()) / scale**2, kind)


def _measure_sharpness(signal: FloatImage, mask: BinaryMask) -> float:
    """Median over the outlines of the largest density gradient nearby, per tenth of a diameter."""
    gradient = cv2.magnitude(cv2.Sobel(signal, cv2.CV_32F, 1, 0), cv2.Sobel(signal, cv2.CV_32F, 0, 1)) / 8
    nearby_max = cv2.dilate(gradient, np.ones((7, 7), np.uint8))
    outline = cv2.morphologyEx(mask, cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8)) > 0
    return float(np.median(nearby_max[outline])) * WORKING_DIAMETER_PX / 10 if outline.any() else 0.0


def _empty_od_image(image: RgbImage) -> OpticalDensityImage:
    zeros = np.zeros(image.shape, np.float32)
    median_rgb = np.median(image.reshape(-1, 3), axis=0) if image.size else np.zeros(3)
    return OpticalDensityImage(
        zeros, zeros[..., 0], 0.0, (float(median_rgb[0]), float(median_rgb[1]), float(median_rgb[2]))
    )
