"""Unusual images of a site: blank, black, over-exposed, blurred, or of unusual colour, brightness or contrast.

A value is unusual if it is far from the site's median in units of the site's spread (median absolute deviation). An
unusual image can be correct, e.g. with a rare stain, so a person decides.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from sites.data_check.findings import Finding, ProgressCallback, format_count, ignore_progress

MEASURE_NAMES = ("brightness", "contrast", "sharpness", "saturation", "dark", "light", "red", "blue")
OUTLIER_Z_SCORE = 6.0  # robust standard deviations
BLUR_Z_SCORE = 3.5  # of sharpness: at most 1 in 1,000 cells of Chula, BCCD and MP-IDB is less sharp
MAX_OUTLIER_FRACTION = 0.02  # of a site's images; more come from another source
MIN_CONTRAST = 2.0  # grey levels
MIN_CLIPPED_FRACTION = 0.5  # of the pixels
MIN_MEDIAN_BRIGHTNESS = 25.0  # median over the site; below, its pixels do not use their range
# lower bounds of the spread: where all images are alike, tiny differences are not unusual
MIN_SPREADS = dict(zip(MEASURE_NAMES, (4.0, 2.0, 0.25, 4.0, 0.02, 0.02, 0.01, 0.01), strict=True))


@dataclass(frozen=True)
class OutlierGroup:
    """The rows of one kind, most unusual first. `values`: robust z-scores, fractions of clipped pixels, or contrasts."""

    kind: str
    description: str
    rows: np.ndarray
    values: np.ndarray

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        images = [{"image": names[r], "value": round(float(v), 3)} for r, v in zip(self.rows, self.values, strict=True)]
        return {"kind": self.kind, "means": self.description, "count": len(self.rows), "images": images}


def robust_z_scores(values: np.ndarray, min_spread: float) -> np.ndarray:
    """1.4826 median absolute deviations are one standard deviation of normally distributed values."""
    median = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - median)))
    return np.asarray((values - median) / max(spread, min_spread))


def find_outliers(measures: ImageMeasures) -> list[OutlierGroup]:
    """An image is in at most one group: the first in this order."""
    if not len(measures.values):
        return []
    z_scores = {name: robust_z_scores(measures.column(name), min_spread) for name, min_spread in MIN_SPREADS.items()}
    hue = np.hypot(z_scores["red"], z_scores["blue"])
    light, dark, contrast = measures.column("light"), measures.column("dark"), measures.column("contrast")
    criteria: tuple[tuple[str, str, np.ndarray, np.ndarray], ...] = (
        (
            "black",
            "more than half of the pixels are black",
            (dark > MIN_CLIPPED_FRACTION) & (z_scores["dark"] > OUTLIER_Z_SCORE),
            dark,
        ),
        ("blank", "nearly the same grey value everywhere", contrast < MIN_CONTRAST, contrast),
        (
            "over-exposed",
            "more than half of the pixels are white",
            (light > MIN_CLIPPED_FRACTION) & (z_scores["light"] > OUTLIER_Z_SCORE),
            light,
        ),
        (
            "blurred",
            "far less sharp than the site's other images",
            z_scores["sharpness"] < -BLUR_Z_SCORE,
            -z_scores["sharpness"],
        ),
        (
            "noisy",
            "far more fine detail than the site's other images",
            z_scores["sharpness"] > OUTLIER_Z_SCORE,
            z_scores["sharpness"],
        ),
        (
            "odd-coloured",
            "a colour unlike the site's other images",
            (hue > OUTLIER_Z_SCORE) | (z_scores["saturation"] > OUTLIER_Z_SCORE),
            np.maximum(hue, z_scores["saturation"]),
        ),
        (
            "dark",
            "far darker than the site's other images",
            z_scores["brightness"] < -OUTLIER_Z_SCORE,
            -z_scores["brightness"],
        ),
        (
            "bright",
            "far brighter than the site's other images",
            z_scores["brightness"] > OUTLIER_Z_SCORE,
            z_scores["brightness"],
        ),
        (
            "flat",
            "far less contrast than the site's other images",
            z_scores["contrast"] < -OUTLIER_Z_SCORE,
            -z_scores["contrast"],
        ),
        (
            "harsh",
            "far more contrast than the site's other images",
            z_scores["contrast"] > OUTLIER_Z_SCORE,
            z_scores["contrast"],
        ),
    )
    groups, is_grouped = [], np.zeros(len(contrast), bool)
    for kind, description, is_outlier, score in criteria:
        rows = np.flatnonzero(is_outlier & ~is_grouped)
        is_grouped[rows] = True
        if len(rows):
            rows = rows[np.argsort(-score[rows], kind="stable")]
            groups.append(OutlierGroup(kind, description, rows, score[rows]))
    return groups


REMEDIES = {
    "black": "remove them, or scan them again",
    "blank": "remove them: a model cannot learn anything from them",
    "over-exposed": "scan them again with less light, or remove them",
    "blurred": "scan them again in focus, or remove them",
    "noisy": "look at them on the page, and remove damaged images",
    "odd-coloured": "look at them on the page: they may have another stain or a colour cast, or not show a smear at all",
}
OTHER_SOURCE_REMEDY = (
    "so many probably come from another stain, scanner or camera: ask the study lead whether they belong in the study"
)
DEFAULT_REMEDY = "look at them on the page; keep them if future images will look like this, otherwise remove them"


def quality_findings(
    outliers: Sequence[OutlierGroup], measures: ImageMeasures, display_name: Callable[[int], str]
) -> Iterator[Finding]:
    """Outliers, and darkness of most images: an image is no outlier if most are like it."""
    num_images = len(measures.values)
    if (
        num_images
        and float(np.median(measures.column("brightness"))) < MIN_MEDIAN_BRIGHTNESS
        and float(np.median(measures.column("dark"))) < MIN_CLIPPED_FRACTION
    ):
        yield Finding(
            "look",
            "pixels",
            "most images are nearly black",
            "if these are 12-bit values in 16-bit files, multiply all images by the same factor, so that they use all 16 bits",
        )
    for group in outliers:
        message = f"{format_count(len(group.rows), 'image is', 'images are')} {group.kind}: {group.description}"
        names = tuple(display_name(int(row)) for row in group.rows)
        is_few = len(group.rows) <= max(MAX_OUTLIER_FRACTION * num_images, 3)
        yield Finding(
            "look",
            "pixels",
            message,
            REMEDIES.get(group.kind, DEFAULT_REMEDY) if is_few else OTHER_SOURCE_REMEDY,
            names,
        )


# Measures of every image: enough to find outliers and duplicates, and computed in seconds for ten thousand cells.

IMAGES_PER_CHUNK = 256  # for one task of the thread pool
MAX_SIDE_PIXELS = 1024  # larger images are downsized first
MAX_DARK_GRAY, MIN_LIGHT_GRAY = 2, 253  # grey values that count as clipped
SKETCH_SIDE_PIXELS = 16  # of the sketches by which duplicates are compared


@dataclass(frozen=True)
class ImageMeasures:
    """Measures of N images. `values` has the columns MEASURE_NAMES: brightness, contrast (standard deviation of grey)
    and saturation from 0 to 255; sharpness (log of the variance of the Laplacian relative to the squared brightness, so
    that dark images do not count as blurred); fractions of dark and light clipped pixels; fractions of red and blue."""

    values: np.ndarray  # (N, 8) float32
    digest: np.ndarray  # (N,) 16 bytes: equal for identical pixels
    perceptual_hash: np.ndarray  # (N, 8) uint16: 128 bits, whether the image gets lighter to the right and downwards
    sketch: np.ndarray  # (N, SKETCH_SIDE_PIXELS ** 2) uint8

    def column(self, name: str) -> np.ndarray:
        return self.values[:, MEASURE_NAMES.index(name)]


def measure_images(x: np.ndarray, on_progress: ProgressCallback = ignore_progress) -> ImageMeasures:
    """x: (N, C, H, W) uint8 with one or three channels."""
    num_images = len(x)
    values = np.zeros((num_images, len(MEASURE_NAMES)), np.float32)
    digest = np.zeros(num_images, "V16")
    thumbnails = np.zeros((num_images, 9, 9), np.int16)
    sketch = np.zeros((num_images, SKETCH_SIDE_PIXELS * SKETCH_SIDE_PIXELS), np.uint8)

    def measure_chunk(first: int) -> None:
        for row in range(first, min(first + IMAGES_PER_CHUNK, num_images)):
            values[row], thumbnails[row], sketch[row] = _measure_image(x[row])
            digest[row] = np.void(hashlib.blake2b(x[row].tobytes(), digest_size=16).digest())

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for num_chunks, _ in enumerate(pool.map(measure_chunk, range(0, num_images, IMAGES_PER_CHUNK)), 1):
            on_progress("measuring images", min(num_chunks * IMAGES_PER_CHUNK, num_images), num_images)
    rightwards = thumbnails[:, :8, 1:] > thumbnails[:, :8, :-1]
    downwards = thumbnails[:, 1:, :8] > thumbnails[:, :-1, :8]
    bits = np.concatenate([rightwards.reshape(num_images, 64), downwards.reshape(num_images, 64)], axis=1)
    return ImageMeasures(values, digest, np.packbits(bits, axis=1).view(np.uint16), sketch)


def _measure_image(image: np.ndarray) -> tuple[tuple[float, ...], np.ndarray, np.ndarray]:
    """The measures; 9 x 9 grey values for the perceptual hash; the sketch."""
    import cv2

    pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
    if max(pixels.shape[:2]) > MAX_SIDE_PIXELS:
        scale = MAX_SIDE_PIXELS / max(pixels.shape[:2])
        pixels = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
    is_color = pixels.shape[2] == 3
    gray = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY) if is_color else pixels[:, :, 0]
    mean, std = cv2.meanStdDev(gray)
    laplacian_variance = cv2.meanStdDev(cv2.Laplacian(gray, cv2.CV_16S))[1][0, 0] ** 2
    saturation, red, blue = 0.0, 1 / 3, 1 / 3
    if is_color:
        saturation = cv2.mean(cv2.extractChannel(cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV), 1))[0]
        channels = cv2.mean(pixels)[:3]
        red, blue = ((channels[c] + 1) / (sum(channels) + 3) for c in (0, 2))  # a third each if the image is black
    dark, light = (
        np.count_nonzero(is_clipped) / gray.size for is_clipped in (gray <= MAX_DARK_GRAY, gray >= MIN_LIGHT_GRAY)
    )
    values = (
        mean[0, 0],
        std[0, 0],
        np.log((laplacian_variance + 0.1) / (mean[0, 0] ** 2 + 1)),
        saturation,
        dark,
        light,
        red,
        blue,
    )
    thumbnail = cv2.resize(gray, (9, 9), interpolation=cv2.INTER_AREA)
    sketch = cv2.resize(gray, (SKETCH_SIDE_PIXELS, SKETCH_SIDE_PIXELS), interpolation=cv2.INTER_AREA)
    return values, thumbnail, sketch.ravel()
