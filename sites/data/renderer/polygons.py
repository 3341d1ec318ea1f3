"""Closed outlines as polygons (n, 2), and how to bend, cut, bite and tear them.

All begin as a rough circle. A cut or bite moves the vertices that lie beyond it onto it, so helmets, crescents and
bitten cells stay one polygon.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Outline = NDArray[np.float64]  # (n, 2)

VERTICES = 128
ANGLES = np.linspace(0, 2 * np.pi, VERTICES, endpoint=False)
CIRCLE = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1)
WAVES = np.arange(2, 10)
FREQUENCIES = np.fft.fftfreq(VERTICES, 1 / VERTICES)
HARMONICS = np.concatenate([np.cos(WAVES[:, None] * ANGLES), np.sin(WAVES[:, None] * ANGLES)])  # (2 waves, n)


def pick(rng: Generator, low: float, high: float) -> float:
    return low + (high - low) * rng.random()  # a third of the time of rng.uniform


def blob(rng: Generator, rough: float, fade: float = 1.5) -> Outline:
    """A circle with waves of 2 to 9 periods; `fade`: how much weaker the short ones are."""
    radius = 1 + rough * (rng.standard_normal(2 * len(WAVES)) * _fading(fade)) @ HARMONICS
    return np.asarray(CIRCLE * np.maximum(radius, 0.25)[:, None])


@cache
def _fading(fade: float) -> NDArray[np.float64]:
    waves = np.concatenate([WAVES, WAVES])
    return np.asarray((2 / waves) ** fade)


def normalised(shape: Outline) -> Outline:
    """Its box about the origin, with the area of the unit circle."""
    x, y = shape[:, 0], shape[:, 1]
    area = 0.5 * abs(x[:-1] @ y[1:] - y[:-1] @ x[1:] + x[-1] * y[0] - y[-1] * x[0])
    middle = (shape.min(0) + shape.max(0)) / 2
    return np.asarray((shape - middle) * math.sqrt(math.pi / max(area, 0.2)))


def turned(shape: Outline, angle: float) -> Outline:
    cos, sin = math.cos(angle), math.sin(angle)
    return np.asarray(shape @ np.array([[cos, sin], [-sin, cos]]))


def stretched(shape: Outline, aspect: float) -> Outline:
    return shape * (math.sqrt(aspect), 1 / math.sqrt(aspect))


def bent(shape: Outline, curvature: float) -> Outline:
    """The x axis becomes a circle's arc."""
    if abs(curvature) < 1e-3:
        return shape
    angle = shape[:, 0] * curvature
    reach = 1 / curvature - shape[:, 1]
    return np.stack([reach * np.sin(angle), 1 / curvature - reach * np.cos(angle)], 1)


def cut(shape: Outline, angle: float, keep: float) -> Outline:
    """Straight; `keep`: how much of the reach in the direction `angle` is left."""
    way = np.array([math.cos(angle), math.sin(angle)])
    along = shape @ way
    return np.asarray(shape - np.maximum(along - keep * along.max(), 0)[:, None] * way)


def bitten(shape: Outline, angle: float, depth: float, radius: float) -> Outline:
    """A round bite leaves two horns. Its centre stays outside, or vertices would be pushed the wrong way."""
    way = np.array([math.cos(angle), math.sin(angle)])
    centre = way * ((shape @ way).max() + max(radius - depth, 0.06))
    away = shape - centre
    reach = np.maximum(np.hypot(away[:, 0], away[:, 1]), 1e-6)
    return np.where((reach < radius)[:, None], centre + away * (radius / reach)[:, None], shape)


def horned(shape: Outline, angle: float, length: float, width: float) -> Outline:
    """A spike; `width` is its half angle."""
    gap = np.abs((np.arctan2(shape[:, 1], shape[:, 0]) - angle + np.pi) % (2 * np.pi) - np.pi)
    return shape * (1 + length * np.exp(-((gap / width) ** 1.4)))[:, None]


def pinched(shape: Outline, depth: float, width: float, at: float = 0.0) -> Outline:
    """A waist across the x axis: two lobes, or a knob if `at` is far out."""
    waist = 1 - depth * np.exp(-(((shape[:, 0] - at) / width) ** 2))
    return shape * np.stack([np.ones(len(shape)), waist], 1)


def pointed(shape: Outline, sharpness: float) -> Outline:
    """Both ends of the x axis become tips, as of a leaf."""
    x = shape[:, 0] / np.abs(shape[:, 0]).max()
    return np.asarray(shape * np.stack([np.ones(len(shape)), (1 - x**2 + 1e-3) ** (sharpness / 2)], 1))


def rounded(shape: Outline, waves: float) -> Outline:
    """Vertices evenly along the outline, then only about so many waves are kept: membranes have no sharp corners."""
    steps = np.hypot(*(np.roll(shape, -1, 0) - shape).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    at = np.linspace(0, along[-1], VERTICES, endpoint=False)
    even = np.interp(at, along, np.append(shape[:, 0], shape[0, 0]))
    even = even + 1j * np.interp(at, along, np.append(shape[:, 1], shape[0, 1]))
    smooth = np.fft.ifft(np.fft.fft(even) * np.exp(-((FREQUENCIES / waves) ** 2)))
    return np.stack([smooth.real, smooth.imag], 1)


def ragged(shape: Outline, rng: Generator, size: float) -> Outline:
    """Torn: short irregular waves along the edge."""
    noise = np.convolve(rng.standard_normal(VERTICES + 4), [0.3, 0.47, 0.59, 0.47, 0.3], "valid")
    noise[-8:] += np.linspace(0, 1, 8) * (noise[0] - noise[-1])  # the ends meet
    return shape * (1 + size * noise)[:, None]
