"""How large a field's cells are: from the field, or, where it is too large for one look, from blocks of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.foreground import guess_diameter
from deploy.segmentation.illumination import correct

LOOK = 400 * 300  # pixels of the copy on which the diameter is guessed
ORDINARY = 800  # pixels: a field no longer than this is believed at one look, if its cells are not too small for that
FINEST = 64  # pixels: the side of the smallest blocks
GROW = math.sqrt(2)  # from one size of blocks to the next: any large field has several that fit well
FEW = 6.0  # diameters: in smaller blocks too many cells are cut
ALIKE = 1.25  # two sizes of blocks agree if their diameters differ by no larger factor
SAMPLE = 4  # blocks looked at along each axis, at most
SURE = 3  # sizes of blocks, the field itself the first: if these agree there is no need to look closer ...
ONE_PHOTOGRAPH = 4500  # pixels: ... unless so many tiles are stitched together that each one's lamp looks like a cell

Image = NDArray[np.uint8]


def find_size(image: Image, large: float) -> float:
    """The typical diameter of a cell, in pixels (0: there is none); one look serves fields of `large` diameters.

    A look at too large a part takes a lamp's pattern, or what is left between melted cells, for cells; one at too
    small a part takes what a cell is made of, or a compression's blocks. The diameter is believed that most sizes of
    blocks in a row tell, of those that show between `FEW` and `large` of it; of several the largest, for what is
    smaller than a cell is within cells.
    """
    longest, whole = max(image.shape[:2]), _guess(image)
    if longest <= min(ORDINARY, large * whole):
        return whole
    told: list[tuple[float, float]] = [(longest, whole)]  # (side of the blocks, diameter)
    for step in range(1, int(math.log(max(1.0, longest / FINEST), GROW)) + 1):
        side = longest / GROW**step
        told.append((side, _median(image, math.ceil(side))))
        if step == SURE - 1 and longest <= ONE_PHOTOGRAPH and len(next(_rows(told, large))) == SURE:
            return whole
    rows = [row for row in _rows(told, large) if len(row) > 1]
    if not rows:
        return whole
    best = max(rows, key=lambda row: (len(row), max(row)))
    return whole if longest <= large * whole and _alike(max(best), whole) else max(best)  # crowds fall into parts


def _rows(told: Sequence[tuple[float, float]], large: float) -> Iterator[list[float]]:
    """Diameters that blocks of one size after the other agree about."""
    row: list[float] = []
    for side, size in told:
        fits = size > 0 and FEW * size <= side <= large * size
        if row and not (fits and _alike(row[-1], size)):
            yield row
            row = []
        if fits:
            row.append(size)
    yield row


def _alike(one: float, other: float) -> bool:
    return max(one, other) <= ALIKE * min(one, other)


def _median(image: Image, side: int) -> float:
    """Of the guesses of blocks spread over the field that show cells."""
    ys, xs = ([round(s) for s in _spread(length, side)] for length in image.shape[:2])
    guesses = [_guess(image[y : y + side, x : x + side]) for y in ys for x in xs]
    sizes = [size for size in guesses if size]
    return float(np.median(sizes)) if sizes else 0.0


def _spread(length: int, side: int) -> NDArray[np.float64]:
    return np.linspace(0, max(0, length - side), min(SAMPLE, math.ceil(length / side)))


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
