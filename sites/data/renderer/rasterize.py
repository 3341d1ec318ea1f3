"""Renders one cell: an outline and an appearance become a patch of thickness."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import cv2
import numpy as np
from numpy.random import Generator

from sites.data.renderer.cell_appearance import CellAppearance
from sites.data.renderer.polygons import CellOutline

SUBPIXEL_SHIFT = 6  # fillPoly takes vertices in 1/64 of a pixel
TWO_PI = 2 * math.pi
OVERLAP_FRACTION = 0.5  # fraction of the thinner cell that is added where two cells overlap
MARGIN_PIXELS = 2  # around the outline
HEMOGLOBIN_LAYER, AZURE_LAYER, DIRT_LAYER = 0, 1, 2  # indices of the layers (3, H, W)
NOISE_BANK_PIXELS = 512  # side


@lru_cache(maxsize=256)
def centered_coordinates(side: int) -> np.ndarray:
    """(side,) float32: pixel coordinates relative to the centre"""
    return (np.arange(side) - (side - 1) / 2).astype(np.float32)


def smoothstep(low: float, high: float, x: np.ndarray) -> np.ndarray:
    """0 below `low`, 1 above `high`, smooth between."""
    t = x - low
    t *= 1 / (high - low)
    np.minimum(t, 1, out=t)
    np.maximum(t, 0, out=t)
    out = 3 - 2 * t
    out *= t
    out *= t
    return out


def outline_depth(outline: CellOutline, offset: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """(height, width) float32, both odd: how many pixels each pixel is inside the outline; rasterized at twice the size.

    The outline's origin is `offset` away from the patch's centre.
    """
    width, height = (2 * (int(reach) + MARGIN_PIXELS) + 1 for reach in np.abs(outline).max(0).tolist())
    mask = np.zeros((2 * height, 2 * width), np.uint8)
    center = ((2 * offset[0] + width - 0.5) * 2**SUBPIXEL_SHIFT, (2 * offset[1] + height - 0.5) * 2**SUBPIXEL_SHIFT)
    cv2.fillPoly(mask, [(outline * 2 ** (SUBPIXEL_SHIFT + 1) + center).astype(np.int32)], 1, shift=SUBPIXEL_SHIFT)
    distances = cv2.distanceTransform(mask, cv2.DIST_L2, 3)
    return np.asarray(cv2.resize(distances, (width, height), interpolation=cv2.INTER_AREA)) * 0.5


@cache
def smooth_noise_bank(pitch: int) -> np.ndarray:
    """(512, 512) float32 smooth noise, about -1..1, a knot every `pitch` pixels; generated once, for speed."""
    knots = np.random.default_rng([0x3A7E, pitch]).standard_normal(
        (NOISE_BANK_PIXELS // pitch, NOISE_BANK_PIXELS // pitch), np.float32
    )
    return np.asarray(cv2.resize(knots, (NOISE_BANK_PIXELS, NOISE_BANK_PIXELS), interpolation=cv2.INTER_CUBIC))


def sample_smooth_noise(rng: Generator, shape: tuple[int, ...], pitch: int = 8) -> np.ndarray:
    """A random window of the noise bank."""
    y, x = (rng.random(2) * (NOISE_BANK_PIXELS - shape[0], NOISE_BANK_PIXELS - shape[1])).astype(int).tolist()
    return smooth_noise_bank(pitch)[y : y + shape[0], x : x + shape[1]]


def render_cell(
    outline: CellOutline, appearance: CellAppearance, offset: tuple[float, float], rng: Generator
) -> np.ndarray:
    """(height, width) float32 thickness, about 0..1"""
    depth_map = outline_depth(outline, offset)
    radius = max(float(depth_map.max()), 1.0)
    pallor_depth = appearance.pallor_depth * min(1.0, radius / 10)  # narrow cells have hardly any pallor
    noise = sample_smooth_noise(rng, depth_map.shape, appearance.mottle_pitch)
    x, y = centered_coordinates(depth_map.shape[1]), centered_coordinates(depth_map.shape[0])[:, None]
    tilt_angle, slit_angle, slit_bow, slit_shift = rng.random(4).tolist()
    inward = cv2.blur(depth_map, (5, 5))
    inward *= 1 / radius
    tilt_slope = appearance.pallor_offset / (2 * radius)
    inward += (tilt_slope * math.cos(TWO_PI * tilt_angle)) * x + (tilt_slope * math.sin(TWO_PI * tilt_angle)) * y
    inward += (0.006 * appearance.mottle_pitch) * noise
    profile = 1 - pallor_depth * smoothstep(appearance.pallor_start, appearance.pallor_full, inward)
    if appearance.bump:
        profile += (appearance.bump * pallor_depth) * smoothstep(
            1 - appearance.bump_size, 1.12 - 0.5 * appearance.bump_size, inward
        )
    if appearance.slit:
        cos, sin = math.cos(TWO_PI * slit_angle) / radius, math.sin(TWO_PI * slit_angle) / radius
        along = cos * x + sin * y
        across = cos * y - sin * x + (slit_bow - 0.5) * along * along + 0.2 * (slit_shift - 0.5)
        slit_distance = np.square(along * (1 / appearance.slit_length)) + np.square(
            across * (1 / appearance.slit_width)
        )
        profile -= appearance.slit * np.exp(-slit_distance * slit_distance)
    profile *= noise * (appearance.mottle * appearance.density) + appearance.density
    np.maximum(profile, 0.02, out=profile)
    profile *= smoothstep(0, appearance.edge_width, depth_map)
    return profile


def add_patch(layers: np.ndarray, patch: np.ndarray, x: int, y: int, layer: int) -> None:
    """Adds the part of a patch (of odd sides, centred on x, y) that is inside the layer."""
    half_height, half_width = patch.shape[0] // 2, patch.shape[1] // 2
    left, top = max(x - half_width, 0), max(y - half_height, 0)
    right, bottom = min(x + half_width + 1, layers.shape[2]), min(y + half_height + 1, layers.shape[1])
    if left < right and top < bottom:
        x0, y0 = left - x + half_width, top - y + half_height
        region, patch = layers[layer, top:bottom, left:right], patch[y0 : y0 + bottom - top, x0 : x0 + right - left]
        if layer == HEMOGLOBIN_LAYER:  # overlapping cells press each other flat
            region -= (1 - OVERLAP_FRACTION) * np.minimum(region, patch)
        region += patch
