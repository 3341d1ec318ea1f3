"""Colour and optics: absorption by the stain, then the effects of lamp, lens, sensor and file format.

STAIN_SESSIONS has means and spreads that were measured on a public data set (see __init__.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import cv2
import numpy as np
from numpy.random import Generator


@dataclass(frozen=True)
class StainSession:
    """Slides that were stained and photographed together: their mean colours, and how much these vary."""

    weight: float  # relative frequency
    background: tuple[float, float, float]  # RGB of empty glass
    brightness_spread: float  # standard deviation of the logarithm
    tint: tuple[float, float, float]  # RGB direction in which the background's colour drifts
    strengths: tuple[tuple[float, float], ...]  # absorbance of green: median and standard deviation of the logarithm
    red: tuple[float, float]  # absorbance of red relative to green: mean, standard deviation


STAIN_SESSIONS = (
    StainSession(0.13, (128, 136, 138), 0.03, (-3, -1, 2), ((0.25, 0.2), (0.45, 0.2)), (0.32, 0.1)),
    StainSession(0.08, (114, 134, 148), 0.03, (-7, -4, 3), ((0.45, 0.2),), (0.49, 0.1)),  # blue
    StainSession(0.24, (138, 146, 139), 0.03, (-2, 1, -1), ((0.58, 0.2), (0.58, 0.2), (0.25, 0.2)), (0.36, 0.09)),
    StainSession(0.34, (165, 173, 166), 0.03, (-3, 1, -2), ((0.22, 0.18), (0.44, 0.18)), (0.30, 0.09)),
    StainSession(0.06, (135, 138, 136), 0.03, (-1, 1, 1), ((0.24, 0.2),), (0.19, 0.06)),  # grey
    StainSession(0.12, (171, 180, 172), 0.025, (-11, 0, -1), ((0.42, 0.2),), (0.35, 0.12)),  # mint
    StainSession(0.03, (177, 181, 158), 0.03, (-2, 0, -6), ((0.42, 0.2),), (0.36, 0.1)),  # yellow
)


@dataclass(frozen=True)
class StainOptics:
    background: np.ndarray  # (3,) RGB 0..255
    absorbance: np.ndarray  # (3, 3): of red, green, blue (rows) by haemoglobin, azure dye, dirt (columns)
    blur_pixels: float  # standard deviation of the Gaussian blur
    edge_sharpness: float  # dark line and bright halo at edges
    fringe: tuple[float, float]  # chromatic aberration: shift of red in pixels; blue is shifted the opposite way
    noise_std: float
    jpeg_quality: int


def sample_stain(rng: Generator) -> StainOptics:
    weights = np.array([s.weight for s in STAIN_SESSIONS])
    session = STAIN_SESSIONS[int(rng.choice(len(STAIN_SESSIONS), p=weights / weights.sum()))]
    background = np.array(session.background) * rng.lognormal(0, session.brightness_spread)
    background = background + abs(rng.normal()) * np.array(session.tint) + rng.normal(0, 1, 3)
    median, spread = session.strengths[int(rng.integers(len(session.strengths)))]
    green = 0.94 * median * rng.lognormal(0, spread)
    red, blue = np.clip(rng.normal(*session.red), 0.1, 0.7), np.clip(rng.normal(0.64, 0.06), 0.5, 0.85)
    hemoglobin = green * np.array([red, 1, blue])
    azure = rng.uniform(0.7, 1.1) * np.array([0.6, 1, 0.3])
    return StainOptics(
        background=background,
        absorbance=np.stack([hemoglobin, azure, np.array([1, 1, 0.95])], 1),
        blur_pixels=float(rng.uniform(0.5, 1.0)),
        edge_sharpness=float(rng.uniform(0.2, 0.9)),
        fringe=(float(rng.normal(0, 0.35)), float(rng.normal(0, 0.35))),
        noise_std=float(rng.uniform(1.2, 2.0)),
        jpeg_quality=int(rng.integers(86, 96)),
    )


def perturb_stain(stain: StainOptics, rng: Generator) -> StainOptics:
    """The same slide in another field: exposure, thickness of the film and focus drift a little."""
    return replace(
        stain,
        background=stain.background * rng.lognormal(0, 0.012) + rng.normal(0, 0.8, 3),
        absorbance=stain.absorbance * rng.lognormal(0, 0.05),
        blur_pixels=stain.blur_pixels * float(rng.lognormal(0, 0.12)),
    )


@cache
def sensor_noise_bank() -> np.ndarray:
    """(768, 1024, 3) float32 sensor noise with a standard deviation of 1, mostly grey. Every field takes a random
    window, because generating noise is slow."""
    rng = np.random.default_rng(0x0153)
    gray = cv2.GaussianBlur(rng.standard_normal((768, 1024, 1), np.float32), (3, 3), 0.75)
    tint = cv2.GaussianBlur(rng.standard_normal((768, 1024, 3), np.float32), (5, 5), 1.1)
    return np.ascontiguousarray(0.88 * gray[..., None] / gray.std() + 0.45 * tint / tint.std())


def render_background(background: np.ndarray, rng: Generator, height: int, width: int) -> np.ndarray:
    """(height, width, 3) float32 empty glass: an off-centre lamp, vignetting, an uneven film."""
    y, x = np.mgrid[-1:1:9j, -1:1:12j]
    slope = rng.normal(0, 0.018, 2)
    brightness = (
        1 + slope[0] * x + slope[1] * y - rng.uniform(0, 0.04) * (x * x + y * y) + rng.normal(0, 0.004, (9, 12))
    )
    color_gradient = rng.normal(0, 0.007, (2, 3))  # the lamp's colour varies slightly over the field
    glass = (
        background * brightness[..., None] * (1 + color_gradient[0] * x[..., None] + color_gradient[1] * y[..., None])
    )
    return np.asarray(cv2.resize(glass.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR))


def develop_image(layers: np.ndarray, stain: StainOptics, rng: Generator) -> np.ndarray:
    """(3, H, W) float32 amounts of haemoglobin, azure dye, dirt -> (H, W, 3) uint8 RGB, as a camera saves it."""
    height, width = layers.shape[1:]
    cells, azure, dirt = (cv2.GaussianBlur(layer, (7, 7), stain.blur_pixels) for layer in layers)
    cells = _sharpen_edges(cells, stain.edge_sharpness)
    planes = []  # BGR, OpenCV's channel order
    for (cell_factor, azure_factor, dirt_factor), shift_sign in zip(
        (-stain.absorbance[::-1]).tolist(), (-1, 0, 1), strict=True
    ):
        translation = np.array([[1, 0, shift_sign * stain.fringe[0]], [0, 1, shift_sign * stain.fringe[1]]], np.float32)
        shifted = (
            cv2.warpAffine(cells, translation, (width, height), borderMode=cv2.BORDER_REFLECT_101)
            if shift_sign
            else cells
        )
        planes.append(cv2.scaleAdd(dirt, dirt_factor, cv2.scaleAdd(azure, azure_factor, cell_factor * shifted)))
    image = cv2.merge(planes)  # in place from here on: allocating memory takes longer than the arithmetic
    cv2.exp(image, image)
    cv2.multiply(image, render_background(stain.background[::-1], rng, height, width), image)
    bank = sensor_noise_bank()
    y, x = rng.integers(bank.shape[0] - height), rng.integers(bank.shape[1] - width)
    cv2.scaleAdd(bank[y : y + height, x : x + width], stain.noise_std, image, image)
    _, data = cv2.imencode(".jpg", cv2.convertScaleAbs(image), [cv2.IMWRITE_JPEG_QUALITY, stain.jpeg_quality])
    return np.asarray(cv2.cvtColor(cv2.imdecode(data, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB))


def _sharpen_edges(layer: np.ndarray, amount: float) -> np.ndarray:
    """Adds the dark line and bright halo that refraction and the camera's sharpening produce at edges."""
    halved = cv2.resize(layer, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
    blurred = cv2.resize(cv2.GaussianBlur(halved, (7, 7), 1.1), layer.shape[::-1], interpolation=cv2.INTER_LINEAR)
    return np.asarray(cv2.addWeighted(layer, 1 + amount, blurred, -amount, 0))
