"""Closed outlines as polygons (n, 2), and functions that bend, cut, bite and tear them.

Every outline starts as a rough circle. A cut or bite moves the vertices beyond it onto it, so helmets, crescents and
bitten cells remain one polygon.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

CellOutline = NDArray[np.float64]  # (n, 2)

NUM_VERTICES = 128
ANGLES = np.linspace(0, 2 * np.pi, NUM_VERTICES, endpoint=False)
UNIT_CIRCLE = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1)
WAVE_NUMBERS = np.arange(2, 10)
FREQUENCIES = np.fft.fftfreq(NUM_VERTICES, 1 / NUM_VERTICES)
HARMONICS = np.concatenate(
    [np.cos(WAVE_NUMBERS[:, None] * ANGLES), np.sin(WAVE_NUMBERS[:, None] * ANGLES)]
)  # (2 * waves, n)


def sample_uniform(rng: Generator, low: float, high: float) -> float:
    return low + (high - low) * rng.random()  # takes a third of the time of rng.uniform


def rough_circle(rng: Generator, roughness: float, decay: float = 1.5) -> CellOutline:
    """A circle with random waves of 2 to 9 periods; the larger `decay`, the weaker the short waves."""
    radius = 1 + roughness * (rng.standard_normal(2 * len(WAVE_NUMBERS)) * _wave_amplitudes(decay)) @ HARMONICS
    return np.asarray(UNIT_CIRCLE * np.maximum(radius, 0.25)[:, None])


@cache
def _wave_amplitudes(decay: float) -> NDArray[np.float64]:
    waves = np.concatenate([WAVE_NUMBERS, WAVE_NUMBERS])
    return np.asarray((2 / waves) ** decay)


def normalize_area(shape: CellOutline) -> CellOutline:
    """Moves the centre of the bounding box to the origin, and scales to the area of the unit circle."""
    x, y = shape[:, 0], shape[:, 1]
    area = 0.5 * abs(x[:-1] @ y[1:] - y[:-1] @ x[1:] + x[-1] * y[0] - y[-1] * x[0])
    center = (shape.min(0) + shape.max(0)) / 2
    return np.asarray((shape - center) * math.sqrt(math.pi / max(area, 0.2)))


def rotate_outline(shape: CellOutline, angle: float) -> CellOutline:
    cos, sin = math.cos(angle), math.sin(angle)
    return np.asarray(shape @ np.array([[cos, sin], [-sin, cos]]))


def stretch_outline(shape: CellOutline, aspect: float) -> CellOutline:
    return shape * (math.sqrt(aspect), 1 / math.sqrt(aspect))


def bend_outline(shape: CellOutline, curvature: float) -> CellOutline:
    """Bends the x axis into an arc of a circle."""
    if abs(curvature) < 1e-3:
        return shape
    angle = shape[:, 0] * curvature
    radii = 1 / curvature - shape[:, 1]
    return np.stack([radii * np.sin(angle), 1 / curvature - radii * np.cos(angle)], 1)


def cut_straight(shape: CellOutline, angle: float, keep_fraction: float) -> CellOutline:
    """Cuts along a line; `keep_fraction`: how much of the extent in the direction `angle` remains."""
    direction = np.array([math.cos(angle), math.sin(angle)])
    projection = shape @ direction
    return np.asarray(shape - np.maximum(projection - keep_fraction * projection.max(), 0)[:, None] * direction)


def bite_outline(shape: CellOutline, angle: float, depth: float, radius: float) -> CellOutline:
    """A round bite, which leaves two horns. Its centre is outside: otherwise vertices would be pushed the wrong way."""
    direction = np.array([math.cos(angle), math.sin(angle)])
    center = direction * ((shape @ direction).max() + max(radius - depth, 0.06))
    offsets = shape - center
    distances = np.maximum(np.hypot(offsets[:, 0], offsets[:, 1]), 1e-6)
    return np.where((distances < radius)[:, None], center + offsets * (radius / distances)[:, None], shape)


def add_horn(shape: CellOutline, angle: float, length: float, width: float) -> CellOutline:
    """A spike; `width` is its half angle in radians."""
    gap = np.abs((np.arctan2(shape[:, 1], shape[:, 0]) - angle + np.pi) % (2 * np.pi) - np.pi)
    return shape * (1 + length * np.exp(-((gap / width) ** 1.4)))[:, None]


def pinch_waist(shape: CellOutline, depth: float, width: float, center_x: float = 0.0) -> CellOutline:
    """Narrows the outline across the x axis: two lobes, or a knob if `center_x` is far from 0."""
    waist = 1 - depth * np.exp(-(((shape[:, 0] - center_x) / width) ** 2))
    return shape * np.stack([np.ones(len(shape)), waist], 1)


def taper_ends(shape: CellOutline, sharpness: float) -> CellOutline:
    """Tapers both ends of the x axis into tips, like a leaf."""
    x = shape[:, 0] / np.abs(shape[:, 0]).max()
    return np.asarray(shape * np.stack([np.ones(len(shape)), (1 - x**2 + 1e-3) ** (sharpness / 2)], 1))


def smooth_outline(shape: CellOutline, max_waves: float) -> CellOutline:
    """Spaces the vertices evenly along the outline, then damps waves of more than about `max_waves` periods: membranes
    have no sharp corners."""
    steps = np.hypot(*(np.roll(shape, -1, 0) - shape).T)
    arc_length = np.concatenate([[0.0], np.cumsum(steps)])
    positions = np.linspace(0, arc_length[-1], NUM_VERTICES, endpoint=False)
    resampled = np.interp(positions, arc_length, np.append(shape[:, 0], shape[0, 0]))
    resampled = resampled + 1j * np.interp(positions, arc_length, np.append(shape[:, 1], shape[0, 1]))
    smoothed = np.fft.ifft(np.fft.fft(resampled) * np.exp(-((FREQUENCIES / max_waves) ** 2)))
    return np.stack([smoothed.real, smoothed.imag], 1)


def roughen_edge(shape: CellOutline, rng: Generator, amplitude: float) -> CellOutline:
    """Short irregular waves along the edge, as of a torn cell."""
    noise = np.convolve(rng.standard_normal(NUM_VERTICES + 4), [0.3, 0.47, 0.59, 0.47, 0.3], "valid")
    noise[-8:] += np.linspace(0, 1, 8) * (noise[0] - noise[-1])  # no step where the outline closes
    return shape * (1 + amplitude * noise)[:, None]
