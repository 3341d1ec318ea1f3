"""From a photograph of a blood smear to its cells, with NumPy and OpenCV alone.

The lamp is divided out, cells are told from glass, pallor is filled, touching cells are cut apart by distance
transform and watershed, and each region is named by size and colour. All of it happens on a copy scaled so that a red
cell measures `WORK` pixels: one set of lengths then fits every microscope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.cell_size import LOOK, find_size, scaled
from deploy.segmentation.classify import Kind, name_kinds, traits
from deploy.segmentation.foreground import filled, foreground
from deploy.segmentation.illumination import Light, Mask, Plane, correct
from deploy.segmentation.watershed import Region, pressed, split

WORK = 36.0
BLUR = 0.03  # of a diameter: the noise of the camera, not the outlines
LARGE = 24.0  # diameters: of a longer field, the lamp is found block by block
BLOCK = 16.0  # diameters: a block's side, about that of a camera's ordinary field
LEAST = 12  # pixels: a smaller image holds no cell
TINY, HUGE = 6.0, 600.0  # a cell's diameter in pixels of the image given

Image = NDArray[np.uint8]


@dataclass(frozen=True)
class Blob:
    box: tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels of the image given; x1, y1 exclusive
    centre: tuple[float, float]  # x, y of the box's middle (crops are cut about it)
    area: float  # pixels of the image given
    kind: Kind  # only "red" cells are counted; "border": cut by the edge; "clump": cells that could not be separated


@dataclass(frozen=True)
class Found:
    blobs: tuple[Blob, ...]  # in reading order
    diameter: float  # typical diameter (pixels) of a single red cell in this field; the given one if given; 0: no cells
    glass: tuple[float, float, float]  # background RGB
    focus: float  # steepness of the outlines, in cells' densities a tenth of a diameter: larger = sharper
    measured: float = (
        0.0  # where a diameter was given: the one that the field itself tells; 0: none was, or none can be told
    )


@dataclass(frozen=True)
class Parts:
    """What was found on the working copy, which is `scale` times the image given."""

    regions: tuple[Region, ...]
    light: Light
    scale: float
    focus: float


def find_cells(image: Image, diameter: float | None = None) -> Found:
    """The cells of a field (H, W, 3) uint8 RGB; without a `diameter` their size is found from the field itself."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(f"the image is {image.dtype} {image.shape}: give (height, width, 3) uint8, red first")
    parts = find_parts(image, diameter)
    if not parts.regions:
        return Found((), diameter or 0.0, parts.light.glass, 0.0)
    against = pressed(parts.regions, parts.light.signal.shape)
    found = [traits(region, parts.light, share) for region, share in zip(parts.regions, against, strict=True)]
    kinds, measured = name_kinds(found, WORK)
    blobs = [_blob(r, kind, parts.scale, image.shape) for r, kind in zip(parts.regions, kinds, strict=True)]
    blobs.sort(key=lambda blob: (blob.box[1], blob.box[0], blob.box))
    itself = find_size(image, LARGE) if diameter else 0.0
    return Found(tuple(blobs), diameter or measured / parts.scale, parts.light.glass, parts.focus, itself)


def find_parts(image: Image, diameter: float | None = None) -> Parts:
    """Regions with their masks, not yet named."""
    high, wide = image.shape[:2]
    if min(high, wide) < LEAST:
        return Parts((), _nothing(image), 1.0, 0.0)
    size = diameter or find_size(image, LARGE)
    if not TINY <= size <= HUGE:
        return Parts((), correct(scaled(image, min(1.0, math.sqrt(LOOK / (high * wide)))), 1.0), 1.0, 0.0)
    scale = WORK / size
    light = correct(scaled(image, scale), BLUR * WORK, BLOCK * WORK if max(high, wide) > LARGE * size else None)
    mask, typical = foreground(light)
    if not typical:
        return Parts((), light, scale, 0.0)
    mask = filled(mask, light.signal, typical, WORK)
    return Parts(split(mask, WORK), light, scale, _focus(light.signal, mask) / typical)


def _blob(region: Region, kind: Kind, scale: float, shape: tuple[int, ...]) -> Blob:
    h, w = region.mask.shape
    x0, y0 = max(0, round(region.x / scale)), max(0, round(region.y / scale))
    x1, y1 = min(shape[1], round((region.x + w) / scale)), min(shape[0], round((region.y + h) / scale))
    return Blob((x0, y0, x1, y1), ((x0 + x1) / 2, (y0 + y1) / 2), float(region.mask.sum()) / scale**2, kind)


def _focus(signal: Plane, mask: Mask) -> float:
    """How steeply density rises at the outlines, for a tenth of a diameter: the median of the steepest near each place."""
    slope = cv2.magnitude(cv2.Sobel(signal, cv2.CV_32F, 1, 0), cv2.Sobel(signal, cv2.CV_32F, 0, 1)) / 8
    near = cv2.dilate(slope, np.ones((7, 7), np.uint8))
    rim = cv2.morphologyEx(mask, cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8)) > 0
    return float(np.median(near[rim])) * WORK / 10 if rim.any() else 0.0


def _nothing(image: Image) -> Light:
    none = np.zeros(image.shape, np.float32)
    middle = np.median(image.reshape(-1, 3), axis=0) if image.size else np.zeros(3)
    return Light(none, none[..., 0], 0.0, (float(middle[0]), float(middle[1]), float(middle[2])))
