"""Colour and optics: what the stain absorbs, what the lamp, the lens, the sensor and the file format add.

The sessions' figures are means and spreads measured on a public data set (see __init__.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import cv2
import numpy as np
from numpy.random import Generator


@dataclass(frozen=True)
class Session:
    weight: float
    background: tuple[float, float, float]
    brightness: float  # spread of the logarithm
    tint: tuple[float, float, float]  # the way in which the background's colour drifts
    strengths: tuple[tuple[float, float], ...]  # absorbance of green: medians and spreads of the logarithm
    red: tuple[float, float]  # absorbance of red, as a share of green's: mean, spread


SESSIONS = (
    Session(0.13, (128, 136, 138), 0.03, (-3, -1, 2), ((0.25, 0.2), (0.45, 0.2)), (0.32, 0.1)),
    Session(0.08, (114, 134, 148), 0.03, (-7, -4, 3), ((0.45, 0.2),), (0.49, 0.1)),  # blue
    Session(0.24, (138, 146, 139), 0.03, (-2, 1, -1), ((0.58, 0.2), (0.58, 0.2), (0.25, 0.2)), (0.36, 0.09)),
    Session(0.34, (165, 173, 166), 0.03, (-3, 1, -2), ((0.22, 0.18), (0.44, 0.18)), (0.30, 0.09)),
    Session(0.06, (135, 138, 136), 0.03, (-1, 1, 1), ((0.24, 0.2),), (0.19, 0.06)),  # grey
    Session(0.12, (171, 180, 172), 0.025, (-11, 0, -1), ((0.42, 0.2),), (0.35, 0.12)),  # mint
    Session(0.03, (177, 181, 158), 0.03, (-2, 0, -6), ((0.42, 0.2),), (0.36, 0.1)),  # yellow
)


@dataclass(frozen=True)
class Stain:
    background: np.ndarray  # (3,) RGB 0..255
    absorbs: np.ndarray  # (3, 3): absorbance of red, green, blue by haemoglobin, azure dye, dirt
    focus: float  # blur in pixels
    crisp: float  # dark line and bright halo at edges
    fringe: tuple[float, float]  # pixels by which red and blue are shifted against each other
    noise: float
    quality: int  # of the JPEG


def draw_stain(rng: Generator) -> Stain:
    weights = np.array([s.weight for s in SESSIONS])
    session = SESSIONS[int(rng.choice(len(SESSIONS), p=weights / weights.sum()))]
    background = np.array(session.background) * rng.lognormal(0, session.brightness)
    background = background + abs(rng.normal()) * np.array(session.tint) + rng.normal(0, 1, 3)
    median, spread = session.strengths[int(rng.integers(len(session.strengths)))]
    green = 0.94 * median * rng.lognormal(0, spread)
    red, blue = np.clip(rng.normal(*session.red), 0.1, 0.7), np.clip(rng.normal(0.64, 0.06), 0.5, 0.85)
    haemoglobin = green * np.array([red, 1, blue])
    azure = rng.uniform(0.7, 1.1) * np.array([0.6, 1, 0.3])
    return Stain(
        background=background,
        absorbs=np.stack([haemoglobin, azure, np.array([1, 1, 0.95])], 1),
        focus=float(rng.uniform(0.5, 1.0)),
        crisp=float(rng.uniform(0.2, 0.9)),
        fringe=(float(rng.normal(0, 0.35)), float(rng.normal(0, 0.35))),
        noise=float(rng.uniform(1.2, 2.0)),
        quality=int(rng.integers(86, 96)),
    )


def nudged(stain: Stain, rng: Generator) -> Stain:
    """The same slide in another field: exposure, thickness of the film and focus drift a little."""
    return replace(
        stain,
        background=stain.background * rng.lognormal(0, 0.012) + rng.normal(0, 0.8, 3),
        absorbs=stain.absorbs * rng.lognormal(0, 0.05),
        focus=stain.focus * float(rng.lognormal(0, 0.12)),
    )


@cache
def noise_bank() -> np.ndarray:
    """(768, 1024, 3) float32 sensor noise of spread 1, mostly grey: a window of it is a field's (drawing takes long)."""
    rng = np.random.default_rng(0x0153)
    grey = cv2.GaussianBlur(rng.standard_normal((768, 1024, 1), np.float32), (3, 3), 0.75)
    tint = cv2.GaussianBlur(rng.standard_normal((768, 1024, 3), np.float32), (5, 5), 1.1)
    return np.ascontiguousarray(0.88 * grey[..., None] / grey.std() + 0.45 * tint / tint.std())


def light(background: np.ndarray, rng: Generator, height: int, width: int) -> np.ndarray:
    """(height, width, 3) float32 empty glass: a lamp off the middle, vignetting, an uneven film."""
    y, x = np.mgrid[-1:1:9j, -1:1:12j]
    slope = rng.normal(0, 0.018, 2)
    coarse = 1 + slope[0] * x + slope[1] * y - rng.uniform(0, 0.04) * (x * x + y * y) + rng.normal(0, 0.004, (9, 12))
    colour = rng.normal(0, 0.007, (2, 3))  # the lamp's colour is not quite the same everywhere
    glass = background * coarse[..., None] * (1 + colour[0] * x[..., None] + colour[1] * y[..., None])
    return np.asarray(cv2.resize(glass.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR))


def develop(layers: np.ndarray, stain: Stain, rng: Generator) -> np.ndarray:
    """(3, H, W) float32 amounts of haemoglobin, azure, dirt -> (H, W, 3) uint8 RGB as a microscope's camera saves it."""
    height, width = layers.shape[1:]
    cells, azure, dirt = (cv2.GaussianBlur(layer, (7, 7), stain.focus) for layer in layers)
    cells = _crisp(cells, stain.crisp)
    planes = []  # BGR, as OpenCV's files have it
    for (a, b, c), side in zip((-stain.absorbs[::-1]).tolist(), (-1, 0, 1), strict=True):
        move = np.array([[1, 0, side * stain.fringe[0]], [0, 1, side * stain.fringe[1]]], np.float32)
        seen = cv2.warpAffine(cells, move, (width, height), borderMode=cv2.BORDER_REFLECT_101) if side else cells
        planes.append(cv2.scaleAdd(dirt, c, cv2.scaleAdd(azure, b, a * seen)))
    view = cv2.merge(planes)  # from here on in place: new pages take longer than the sums
    cv2.exp(view, view)
    cv2.multiply(view, light(stain.background[::-1], rng, height, width), view)
    bank = noise_bank()
    y, x = rng.integers(bank.shape[0] - height), rng.integers(bank.shape[1] - width)
    cv2.scaleAdd(bank[y : y + height, x : x + width], stain.noise, view, view)
    _, data = cv2.imencode(".jpg", cv2.convertScaleAbs(view), [cv2.IMWRITE_JPEG_QUALITY, stain.quality])
    return np.asarray(cv2.cvtColor(cv2.imdecode(data, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB))


def _crisp(soft: np.ndarray, amount: float) -> np.ndarray:
    """With the dark line and bright halo that refraction and the camera's sharpening give edges."""
    small = cv2.resize(soft, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    wide = cv2.resize(cv2.GaussianBlur(small, (7, 7), 1.1), soft.shape[::-1], interpolation=cv2.INTER_LINEAR)
    return np.asarray(cv2.addWeighted(soft, 1 + amount, wide, -amount, 0))
