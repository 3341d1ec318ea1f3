"""Estimates the typical diameter of a field's cells, from the whole field or, if it is large, from blocks of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.foreground import estimate_diameter
from deploy.segmentation.illumination import correct_illumination

MAX_ESTIMATE_PIXELS = 400 * 300  # of the reduced copy that an estimate uses
MAX_SINGLE_ESTIMATE_SIDE_PX = 800  # one estimate suffices for a field up to this side, unless its cells are too small
MIN_BLOCK_PX = 64  # side of the smallest blocks
BLOCK_GROWTH = math.sqrt(2)  # from one block size to the next; several sizes fit any large field
MIN_BLOCK_DIAMETERS = 6.0  # smaller blocks cut too many cells
DIAMETER_TOLERANCE = 1.25  # two block sizes agree if their diameters differ by at most this factor
MAX_BLOCKS_PER_AXIS = 4
MIN_AGREEING_SIZES = 3  # if the field and the next block sizes agree, smaller blocks are skipped ...
MAX_PHOTOGRAPH_SIDE_PX = 4500  # ... up to this side: in a larger stitched field each tile's lamp can look like a cell

RgbImage = NDArray[np.uint8]


def find_cell_diameter(image: RgbImage, max_diameters: float) -> float:
    """The typical diameter of a cell in pixels; 0 if there are no cells.

    An estimate from too large a part mistakes the lamp's pattern or gaps between merged cells for cells; one from too
    small a part mistakes structures inside cells or compression blocks. So the result is the diameter on which the most
    consecutive block sizes agree, among sizes of MIN_BLOCK_DIAMETERS to `max_diameters` diameters; of several, the
    largest, because smaller structures are inside cells.
    """
    longest_side, whole_diameter = max(image.shape[:2]), _estimate_scaled_diameter(image)
    if longest_side <= min(MAX_SINGLE_ESTIMATE_SIDE_PX, max_diameters * whole_diameter):
        return whole_diameter
    estimates: list[tuple[float, float]] = [(longest_side, whole_diameter)]  # (side of the blocks, diameter)
    for step in range(1, int(math.log(max(1.0, longest_side / MIN_BLOCK_PX), BLOCK_GROWTH)) + 1):
        side = longest_side / BLOCK_GROWTH**step
        estimates.append((side, _median_block_diameter(image, math.ceil(side))))
        if (
            step == MIN_AGREEING_SIZES - 1
            and longest_side <= MAX_PHOTOGRAPH_SIDE_PX
            and len(next(_agreeing_runs(estimates, max_diameters))) == MIN_AGREEING_SIZES
        ):
            return whole_diameter
    runs = [run for run in _agreeing_runs(estimates, max_diameters) if len(run) > 1]
    if not runs:
        return whole_diameter
    best_run = max(runs, key=lambda run: (len(run), max(run)))
    return (
        whole_diameter
        if longest_side <= max_diameters * whole_diameter and _are_similar(max(best_run), whole_diameter)
        else max(best_run)
    )  # blocks of crowded fields give diameters of cell parts


def _agreeing_runs(estimates: Sequence[tuple[float, float]], max_diameters: float) -> Iterator[list[float]]:
    """Runs of diameters on which consecutive block sizes agree."""
    run: list[float] = []
    for side, diameter in estimates:
        fits = diameter > 0 and MIN_BLOCK_DIAMETERS * diameter <= side <= max_diameters * diameter
        if run and not (fits and _are_similar(run[-1], diameter)):
            yield run
            run = []
        if fits:
            run.append(diameter)
    yield run


def _are_similar(one: float, other: float) -> bool:
    return max(one, other) <= DIAMETER_TOLERANCE * min(one, other)


def _median_block_diameter(image: RgbImage, side: int) -> float:
    """Median estimate of the blocks with cells, from blocks spread evenly over the field."""
    ys, xs = ([round(s) for s in _block_starts(length, side)] for length in image.shape[:2])
    estimates = [_estimate_scaled_diameter(image[y : y + side, x : x + side]) for y in ys for x in xs]
    diameters = [diameter for diameter in estimates if diameter]
    return float(np.median(diameters)) if diameters else 0.0


def _block_starts(length: int, side: int) -> NDArray[np.float64]:
    return np.linspace(0, max(0, length - side), min(MAX_BLOCKS_PER_AXIS, math.ceil(length / side)))


def _estimate_scaled_diameter(image: RgbImage) -> float:
    scale = min(1.0, math.sqrt(MAX_ESTIMATE_PIXELS / (image.shape[0] * image.shape[1])))
    for _ in range(2):
        diameter = estimate_diameter(correct_illumination(scale_image(image, scale), 1.0)) / scale
        if diameter * scale >= 12 or scale == 1:  # else the cells are too small in the copy: repeat with a larger one
            return diameter
        scale = min(1.0, 24 / diameter) if diameter else min(1.0, 2 * scale)
    return diameter


def scale_image(image: RgbImage, scale: float) -> RgbImage:
    if scale == 1:
        return image
    size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR))
