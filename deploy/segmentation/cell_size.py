"""How large a field's cells are: from the field, or, where it is too large for one look, from blocks of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.foreground import estimate_diameter
from deploy.segmentation.illumination import correct_illumination

MAX_ESTIMATE_PIXELS = 400 * 300  # pixels of the copy on which the diameter is guessed
MAX_SINGLE_ESTIMATE_SIDE_PX = (
    800  # pixels: a field no longer than this is believed at one look, if its cells are not too small for that
)
MIN_BLOCK_PX = 64  # pixels: the side of the smallest blocks
BLOCK_GROWTH = math.sqrt(2)  # from one size of blocks to the next: any large field has several that fit well
MIN_BLOCK_DIAMETERS = 6.0  # diameters: in smaller blocks too many cells are cut
DIAMETER_TOLERANCE = 1.25  # two sizes of blocks agree if their diameters differ by no larger factor
MAX_BLOCKS_PER_AXIS = 4  # blocks looked at along each axis, at most
MIN_AGREEING_SIZES = (
    3  # sizes of blocks, the field itself the first: if these agree there is no need to look closer ...
)
MAX_PHOTOGRAPH_SIDE_PX = (
    4500  # pixels: ... unless so many tiles are stitched together that each one's lamp looks like a cell
)

RgbImage = NDArray[np.uint8]


def find_cell_diameter(image: RgbImage, max_diameters: float) -> float:
    """The typical diameter of a cell, in pixels (0: there is none); one look serves fields of `large` diameters.

    A look at too large a part takes a lamp's pattern, or what is left between melted cells, for cells; one at too
    small a part takes what a cell is made of, or a compression's blocks. The diameter is believed that most sizes of
    blocks in a row tell, of those that show between `FEW` and `large` of it; of several the largest, for what is
    smaller than a cell is within cells.
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
    )  # crowds fall into parts


def _agreeing_runs(estimates: Sequence[tuple[float, float]], max_diameters: float) -> Iterator[list[float]]:
    """Diameters that blocks of one size after the other agree about."""
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
    """Of the guesses of blocks spread over the field that show cells."""
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
        if diameter * scale >= 12 or scale == 1:  # cells as small as dust: look again, closer
            return diameter
        scale = min(1.0, 24 / diameter) if diameter else min(1.0, 2 * scale)
    return diameter


def scale_image(image: RgbImage, scale: float) -> RgbImage:
    if scale == 1:
        return image
    size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR))
