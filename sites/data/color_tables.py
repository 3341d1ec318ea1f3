"""Colour normalisation as a lookup table of 256 grey levels per channel. numpy only: inference machines use it too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import DataError

GRAY_LEVELS = 256
IMAGES_PER_STEP = 256  # bounds memory
MIN_STD = 1 / 255  # a standard deviation below one grey level is rounding noise and is not amplified
SMOOTHING_WIDTH = 9  # grey levels of the moving average that smooths a histogram
DARK_QUANTILE = 0.05  # quantile of the grey levels (0.95 of optical density) that falls inside cells
TARGET_OPTICAL_DENSITY = (0.35, 0.6, 0.4)  # of red, green and blue at that quantile, in a well-stained smear
MIN_OPTICAL_DENSITY = 0.02  # below this there is no cell to measure
MIN_IMAGES = 20  # images needed to estimate a site's colours

ChannelPixels = Sequence[NDArray[np.uint8]]  # per channel (N, pixels)
ColorTable = NDArray[np.uint8]  # (C, 256)


def build_site_table(channels: ChannelPixels, mean: float, std: float) -> ColorTable:
    """A table that gives all pixels this mean and standard deviation per channel, as fractions of full scale."""
    gray = np.linspace(0, 1, GRAY_LEVELS)
    histogram = np.stack([_histogram(channel) for channel in channels]).astype(np.float64)
    histogram /= histogram.sum(1, keepdims=True)
    measured_mean = histogram @ gray
    measured_std = np.sqrt(np.maximum(histogram @ gray**2 - measured_mean**2, 0))
    return quantize_levels((gray - measured_mean[:, None]) / np.maximum(measured_std, MIN_STD)[:, None] * std + mean)


def build_background_table(channels: ChannelPixels, level: float, density: bool) -> ColorTable:
    """I' = level * (I / I0) ** k. I0: median background of the images; with `density`, k sets the optical density."""
    background = np.array([np.quantile(_background_levels(channel), 0.5) for channel in channels])
    transmittance = np.maximum(np.arange(GRAY_LEVELS), 0.5) / background[:, None]
    exponent = _density_exponents(channels, background) if density else np.ones_like(background)
    return quantize_levels(level * transmittance ** exponent[:, None])


def quantize_levels(levels: NDArray[np.float64]) -> ColorTable:
    return np.rint(levels * 255).clip(0, 255).astype(np.uint8)


def build_color_table(settings: Mapping[str, Any], images: NDArray[np.uint8]) -> ColorTable:
    """The table for images (N, H, W, C) of one site. `settings`: the study's [normalization]."""
    if len(images) < MIN_IMAGES:
        raise DataError(
            f"this model normalises the site's colours, and {len(images)} cells are too few to estimate them; give at least "
            f"{MIN_IMAGES} cells of one slide, or run `hemofed edge calibrate` once"
        )
    channels = [images[..., c].reshape(len(images), -1) for c in range(images.shape[-1])]
    if settings["name"] == "site":
        return build_site_table(channels, settings["mean"], settings["std"])
    if settings["name"] == "background":
        return build_background_table(channels, settings["level"], settings["density"])
    raise DataError(
        f"the model's normalisation {settings['name']!r} comes from a plugin, which inference machines do not have"
    )


def apply_table(images: NDArray[np.uint8], table: ColorTable) -> NDArray[np.uint8]:
    """Looks up every pixel of (N, H, W, C) in the table."""
    return np.stack([table[c][images[..., c]] for c in range(images.shape[-1])], -1)


def _histogram(channel: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(256,) integer counts, so the order of summation does not matter."""
    parts = (channel[start : start + IMAGES_PER_STEP].ravel() for start in range(0, len(channel), IMAGES_PER_STEP))
    return np.asarray(np.sum([np.bincount(part, minlength=GRAY_LEVELS) for part in parts], 0, dtype=np.int64))


def _background_levels(channel: NDArray[np.uint8]) -> NDArray[np.float64]:
    """(N,): the most frequent grey level among the brighter half of each image's pixels, at least 1."""
    levels = [
        _histogram_peaks(channel[start : start + IMAGES_PER_STEP]) for start in range(0, len(channel), IMAGES_PER_STEP)
    ]
    return np.concatenate(levels)


def _histogram_peaks(rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    n, width = rows.shape
    counts = np.bincount((rows + np.arange(n)[:, None] * GRAY_LEVELS).ravel(), minlength=n * GRAY_LEVELS).reshape(
        n, GRAY_LEVELS
    )
    half = SMOOTHING_WIDTH // 2
    sums = np.cumsum(np.pad(counts, ((0, 0), (half + 1, half))), 1)
    num_averaged = (
        np.minimum(np.arange(GRAY_LEVELS) + half, GRAY_LEVELS - 1) - np.maximum(np.arange(GRAY_LEVELS) - half, 0) + 1
    )
    smoothed = (sums[:, SMOOTHING_WIDTH:] - sums[:, :-SMOOTHING_WIDTH]) / num_averaged
    median = np.partition(rows, (width - 1) // 2, 1)[:, (width - 1) // 2]
    is_bright = np.arange(GRAY_LEVELS) >= median[:, None]
    return np.asarray(np.maximum((smoothed * is_bright).argmax(1), 1), np.float64)


def _density_exponents(channels: ChannelPixels, background: NDArray[np.float64]) -> NDArray[np.float64]:
    cumulative = np.cumsum([_histogram(channel) for channel in channels], 1)
    dark_level = np.maximum((cumulative < DARK_QUANTILE * cumulative[:, -1:]).sum(1), 1)
    target_density = np.array(
        TARGET_OPTICAL_DENSITY
        if len(background) == len(TARGET_OPTICAL_DENSITY)
        else [math.fsum(TARGET_OPTICAL_DENSITY) / len(TARGET_OPTICAL_DENSITY)]
    )
    return np.asarray(target_density / np.maximum(np.log(background / dark_level), MIN_OPTICAL_DENSITY))
