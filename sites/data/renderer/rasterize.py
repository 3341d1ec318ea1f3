"""One cell: an outline and a look become a patch of thickness."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import cv2
import numpy as np
from numpy.random import Generator

from sites.data.renderer.cell_appearance import Look
from sites.data.renderer.polygons import Outline

SHIFT = 6  # fillPoly's vertices in 1/64 of a pixel
TURN = 2 * math.pi
OVERLAP = 0.5  # how much of the thinner cell adds where two lie on each other
MARGIN = 2  # pixels about the outline
HAEMOGLOBIN, AZURE, GREY = 0, 1, 2  # layers (3, H, W): dye, dye, dirt
BANK = 512  # pixels a side


@lru_cache(maxsize=256)
def ruler(side: int) -> np.ndarray:
    """(side,) float32 from the middle"""
    return (np.arange(side) - (side - 1) / 2).astype(np.float32)


def smooth(low: float, high: float, x: np.ndarray) -> np.ndarray:
    """0 below `low`, 1 above `high`, smooth between."""
    t = x - low
    t *= 1 / (high - low)
    np.minimum(t, 1, out=t)
    np.maximum(t, 0, out=t)
    out = 3 - 2 * t
    out *= t
    out *= t
    return out


def depth_of(outline: Outline, offset: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """(height, width) float32, both odd: how deep inside the outline each pixel is; drawn at twice the size.

    The outline's origin lies `offset` off the patch's middle.
    """
    width, height = (2 * (int(reach) + MARGIN) + 1 for reach in np.abs(outline).max(0).tolist())
    mask = np.zeros((2 * height, 2 * width), np.uint8)
    middle = ((2 * offset[0] + width - 0.5) * 2**SHIFT, (2 * offset[1] + height - 0.5) * 2**SHIFT)
    cv2.fillPoly(mask, [(outline * 2 ** (SHIFT + 1) + middle).astype(np.int32)], 1, shift=SHIFT)
    deep = cv2.distanceTransform(mask, cv2.DIST_L2, 3)
    return np.asarray(cv2.resize(deep, (width, height), interpolation=cv2.INTER_AREA)) * 0.5


@cache
def wave_bank(pitch: int) -> np.ndarray:
    """(BANK, BANK) float32 slow noise, about -1..1, a knot every `pitch` pixels: drawn once, for drawing takes long."""
    knots = np.random.default_rng([0x3A7E, pitch]).standard_normal((BANK // pitch, BANK // pitch), np.float32)
    return np.asarray(cv2.resize(knots, (BANK, BANK), interpolation=cv2.INTER_CUBIC))


def waves(rng: Generator, shape: tuple[int, ...], pitch: int = 8) -> np.ndarray:
    """A window of the bank."""
    y, x = (rng.random(2) * (BANK - shape[0], BANK - shape[1])).astype(int).tolist()
    return wave_bank(pitch)[y : y + shape[0], x : x + shape[1]]


def cell_patch(outline: Outline, look: Look, offset: tuple[float, float], rng: Generator) -> np.ndarray:
    """(height, width) float32 thickness, about 0..1"""
    deep = depth_of(outline, offset)
    radius = max(float(deep.max()), 1.0)
    depth = look.depth * min(1.0, radius / 10)  # what is narrow has hardly any pallor
    noise = waves(rng, deep.shape, look.pitch)
    x, y = ruler(deep.shape[1]), ruler(deep.shape[0])[:, None]
    angle, way, bow, aside = rng.random(4).tolist()
    inward = cv2.blur(deep, (5, 5))
    inward *= 1 / radius
    lean = look.tilt / (2 * radius)
    inward += (lean * math.cos(TURN * angle)) * x + (lean * math.sin(TURN * angle)) * y
    inward += (0.006 * look.pitch) * noise
    profile = 1 - depth * smooth(look.start, look.full, inward)
    if look.bump:
        profile += (look.bump * depth) * smooth(1 - look.bump_size, 1.12 - 0.5 * look.bump_size, inward)
    if look.slit:
        cos, sin = math.cos(TURN * way) / radius, math.sin(TURN * way) / radius
        along = cos * x + sin * y
        across = cos * y - sin * x + (bow - 0.5) * along * along + 0.2 * (aside - 0.5)
        far = np.square(along * (1 / look.slit_long)) + np.square(across * (1 / look.slit_wide))
        profile -= look.slit * np.exp(-far * far)
    profile *= noise * (look.mottle * look.density) + look.density
    np.maximum(profile, 0.02, out=profile)
    profile *= smooth(0, look.edge, deep)
    return profile


def stamp(layers: np.ndarray, patch: np.ndarray, x: int, y: int, layer: int) -> None:
    """Adds a patch of odd sides with its middle at x, y, as far as it lies inside."""
    high, wide = patch.shape[0] // 2, patch.shape[1] // 2
    left, top = max(x - wide, 0), max(y - high, 0)
    right, bottom = min(x + wide + 1, layers.shape[2]), min(y + high + 1, layers.shape[1])
    if left < right and top < bottom:
        x0, y0 = left - x + wide, top - y + high
        part, patch = layers[layer, top:bottom, left:right], patch[y0 : y0 + bottom - top, x0 : x0 + right - left]
        if layer == HAEMOGLOBIN:  # where cells overlap, they are pressed flat
            part -= (1 - OVERLAP) * np.minimum(part, patch)
        part += patch
