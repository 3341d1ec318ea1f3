"""Optical density of each pixel: the photograph relative to its background, with uneven illumination corrected."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

FloatImage = NDArray[np.float32]
BinaryMask = NDArray[np.uint8]  # 0 or 1

OD_CHANNEL_WEIGHTS = (0.15, 0.6, 0.25)  # R, G, B: hemoglobin absorbs green most, red hardly
MAX_FIT_SIDE_PX = 120  # illumination is smooth: it is fitted to a copy of this longest side, or to blocks of it
MIN_OD_NOISE = 0.004  # lower bound of a camera's noise, in optical density


@dataclass(frozen=True)
class OpticalDensityImage:
    density: NDArray[np.float32]  # (H, W, 3) natural optical density: 0 in the background, more in cells
    signal: FloatImage  # (H, W) weighted sum of the channels
    noise: float  # standard deviation of the signal in the background
    background_rgb: tuple[float, float, float]


def correct_illumination(
    image: NDArray[np.uint8], blur_sigma: float, block_px: float | None = None
) -> OpticalDensityImage:
    """Optical density, corrected for illumination, after a Gaussian blur with `blur_sigma` pixels.

    `block_px`: fits the illumination in overlapping blocks of this side. One surface does not fit a stitched field, and a
    reduced copy of a large field would merge background and cells.
    """
    log_image = np.log(_smooth(image.astype(np.float32), blur_sigma) + 1)
    height, width = log_image.shape[:2]
    scale = min(1.0, MAX_FIT_SIDE_PX / (block_px or max(height, width)))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small_log_image = cv2.resize(log_image, size, interpolation=cv2.INTER_AREA).reshape(size[1], size[0], 3)
    illumination, background = (
        _fit_illumination_blocks(small_log_image) if block_px else _fit_illumination(small_log_image)
    )
    # the surface is smooth, so enlarging it adds an error far below the noise
    density = cv2.resize(illumination.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR) - log_image
    # burned-in arrows and scale bars are brighter than the background in some channel; cells never are in green
    signal = np.minimum(density @ np.array(OD_CHANNEL_WEIGHTS, np.float32), 1.2 * density[..., 1])
    full_background = cv2.resize(background.astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST) > 0
    brighter_than_background = -signal[full_background & (signal < 0)]  # the darker half may contain pallor
    noise = (
        max(MIN_OD_NOISE, 1.48 * float(np.median(brighter_than_background)))
        if brighter_than_background.size
        else MIN_OD_NOISE
    )
    background_rgb = np.exp(np.median(small_log_image[background], axis=0)) - 1
    return OpticalDensityImage(
        density, signal, noise, (float(background_rgb[0]), float(background_rgb[1]), float(background_rgb[2]))
    )


def _smooth(image: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    return cv2.GaussianBlur(image, (0, 0), sigma) if sigma > 0.2 else image


def _quadratic_terms(height: int, width: int) -> NDArray[np.float64]:
    """(H, W, 6): 1, x, y, xx, xy, yy over [-1, 1]."""
    y, x = (
        np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        if height > 1 and width > 1
        else np.zeros((2, height, width))
    )
    return np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], -1)


def _fit_illumination_blocks(log_image: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """`_fit_illumination` of blocks that overlap by at least half, blended with a Hann window."""
    height, width = log_image.shape[:2]
    illumination, background_weight, total = (
        np.zeros(log_image.shape),
        np.zeros((height, width)),
        np.zeros((height, width)),
    )
    for y in _block_starts(height):
        for x in _block_starts(width):
            window = slice(y, y + MAX_FIT_SIDE_PX), slice(x, x + MAX_FIT_SIDE_PX)
            surface, background = _fit_illumination(log_image[window])
            weight = np.outer(np.hanning(background.shape[0] + 2)[1:-1], np.hanning(background.shape[1] + 2)[1:-1])
            illumination[window] += surface * weight[..., None]
            background_weight[window] += background * weight
            total[window] += weight
    background_fraction = background_weight / total
    return illumination / total[..., None], background_fraction > background_fraction.max() / 2  # never empty


def _block_starts(length: int) -> list[int]:
    """Starts of evenly spread blocks; the last one ends at `length`."""
    slack = max(0, length - MAX_FIT_SIDE_PX)
    num_steps = -(-2 * slack // MAX_FIT_SIDE_PX)
    return [round(slack * n / max(num_steps, 1)) for n in range(num_steps + 1)]


def _fit_illumination(log_image: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The background's log intensity (H, W, 3), and which pixels are background."""
    surface, background = _fit_surface(log_image, _quadratic_terms(*log_image.shape[:2]))
    return surface + _smooth_residual(log_image - surface, background), background


def _fit_surface(
    log_image: NDArray[np.float32], terms: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The background as a quadratic surface (H, W, 3), and which pixels are background.

    Cells only darken, so a fit with low weights for darker pixels converges to the background; then only pixels near it
    are used.
    """
    gray = log_image @ np.array(OD_CHANNEL_WEIGHTS, np.float32)
    fit = np.full(gray.shape, float(np.quantile(gray, 0.9)))
    for iteration in range(10):
        fit = _weighted_fit(
            gray, np.where(fit > gray + MIN_OD_NOISE, 0.02, 1.0), terms[..., : 3 if iteration < 5 else 6]
        )
    background = np.abs(fit - gray) < 0.1
    for _ in range(6):
        residual = fit - gray  # density
        brighter = residual[(residual < 0) & (residual > -0.1)]
        spread = max(MIN_OD_NOISE, 1.48 * float(np.median(-brighter))) if brighter.size > 20 else MIN_OD_NOISE
        is_inlier = (residual < 2.5 * spread) & (residual > -3.5 * spread)
        if is_inlier.sum() < max(12, 0.02 * is_inlier.size):
            break
        background = is_inlier
        fit = _weighted_fit(gray, background, terms)
    if not background.any():
        background = np.ones(gray.shape, bool)
    surfaces = [_weighted_fit(log_image[..., c], background, terms) for c in range(3)]
    return np.stack(surfaces, -1), background


def _smooth_residual(residual: NDArray[np.float64], background: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Local mean of the background's residual from the quadratic surface; 0 far from any background."""
    sigma = max(residual.shape[:2]) / 12
    weight = cv2.GaussianBlur(background.astype(np.float64), (0, 0), sigma)
    return np.asarray(cv2.GaussianBlur(residual * background[..., None], (0, 0), sigma) / (weight[..., None] + 0.03))


def _weighted_fit(
    values: NDArray[np.float32], weights: NDArray[np.float64] | NDArray[np.bool_], terms: NDArray[np.float64]
) -> NDArray[np.float64]:
    has_weight = weights > 0
    a, b, w = terms[has_weight], values[has_weight], weights[has_weight].astype(float)
    ridge = (
        1e-3 * w.sum() * np.diag([0.0, *[1.0] * (terms.shape[-1] - 1)])
    )  # keeps the surface flat if there is little background
    weighted_terms = a * w[:, None]
    return np.asarray(terms @ np.linalg.solve(weighted_terms.T @ a + ridge, weighted_terms.T @ b))
