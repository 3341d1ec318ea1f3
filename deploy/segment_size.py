"""How large a field's cells are: from the field, or, where it is too large for one look, from blocks of it."""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segment_light import correct
from deploy.segment_mask import guess_diameter

LOOK = 400 * 300  # pixels of the copy on which the diameter is guessed
ORDINARY = 800  # pixels: a field no longer than this is believed at one look, if its cells are not too small for that
FINEST = 64  # pixels: the side of the smallest blocks
GROW = math.sqrt(2)  # from one size of blocks to the next: any large field has two that fit well
FEW = 6.0  # diameters: in smaller blocks too many cells are cut
ALIKE = 1.25  # two sizes of blocks agree if their diameters differ by no larger factor
SAMPLE = 4  # blocks looked at along each axis

Image = NDArray[np.uint8]


def find_size(image: Image, large: float) -> float:
    """The typical diameter of a cell, in pixels (0: there is none); one look serves fields of `large` diameters.

    A look at too large a part takes a lamp's pattern, or what is left between melted cells, for cells; one at too
    small a part takes what a cell is made of. Blocks grow until two sizes of them, both fit, tell the same; the
    larger answer counts, for blocks cut large cells first.
    """
    longest, whole = max(image.shape[:2]), _guess(image)
    if longest <= min(ORDINARY, large * whole):
        return whole
    steps = int(math.log(max(1.0, longest / FINEST), GROW))
    finer = 0.0
    for step in range(steps, -1, -1):
        side = longest / GROW**step
        size = _median(image, math.ceil(side)) if step else whole
        fit = finer > 0 and GROW * FEW * finer <= side <= large * size
        if fit and _alike(size, finer):
            return whole if longest <= large * whole and _alike(size, whole) else max(size, finer)
        finer = size
    return whole


def _alike(one: float, other: float) -> bool:
    return max(one, other) <= ALIKE * min(one, other)


def _median(image: Image, side: int) -> float:
    """Of the guesses of blocks spread over the field that show cells."""
    ys, xs = ([round(s) for s in _spread(length, side)] for length in image.shape[:2])
    guesses = [_guess(image[y : y + side, x : x + side]) for y in ys for x in xs]
    sizes = [size for size in guesses if size]
    return float(np.median(sizes)) if sizes else 0.0


def _spread(length: int, side: int) -> NDArray[np.float64]:
    return np.linspace(0, max(0, length - side), min(SAMPLE, 2 * math.ceil(length / side) - 1))


def _guess(image: Image) -> float:
    scale = min(1.0, math.sqrt(LOOK / (image.shape[0] * image.shape[1])))
    for _ in range(2):
        size = guess_diameter(correct(scaled(image, scale), 1.0)) / scale
        if size * scale >= 12 or scale == 1:  # cells as small as dust: look again, closer
            return size
        scale = min(1.0, 24 / size) if size else min(1.0, 2 * scale)
    return size


def scaled(image: Image, scale: float) -> Image:
    if scale == 1:
        return image
    size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR))
