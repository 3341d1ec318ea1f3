"""Images that stand out among a site's own: blank, black, burnt out, blurred, odd in colour, brightness or contrast.

A figure is odd if it lies far from the site's median in units of the site's spread (median absolute deviation). What is
odd is not wrong: a rare stain is odd too. A person looks.
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
BLUR_Z_SCORE = 3.5  # of sharpness: at most 1 in 1,000 of Chula's, BCCD's and MP-IDB's cells is less sharp
MAX_OUTLIER_FRACTION = 0.02  # share of a site's images
MIN_CONTRAST = 2.0  # contrast, of 255
MIN_CLIPPED_FRACTION = 0.5  # share of clipped pixels
MIN_MEDIAN_BRIGHTNESS = 25.0  # median brightness of a site whose pixels do not use their range
# a spread is never taken for smaller than this, so that images which are all alike do not make tiny differences odd
MIN_SPREADS = dict(zip(MEASURE_NAMES, (4.0, 2.0, 0.25, 4.0, 0.02, 0.02, 0.01, 0.01), strict=True))


@dataclass(frozen=True)
class OutlierGroup:
    """The rows of one kind, most striking first, with how many spreads they lie off (or a share, or a contrast)."""

    kind: str
    description: str
    rows: np.ndarray
    values: np.ndarray

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        images = [{"image": names[r], "value": round(float(v), 3)} for r, v in zip(self.rows, self.values, strict=True)]
        return {"kind": self.kind, "means": self.description, "count": len(self.rows), "images": images}


def robust_z_scores(values: np.ndarray, min_spread: float) -> np.ndarray:
    """Robust z-scores: 1.4826 median absolute deviations are a standard deviation of normal values."""
    median = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - median)))
    return np.asarray((values - median) / max(spread, min_spread))


def find_outliers(measures: ImageMeasures) -> list[OutlierGroup]:
    """Every image has at most one kind: the first in this order."""
    if not len(measures.values):
        return []
    z_scores = {name: robust_z_scores(measures.column(name), min_spread) for name, min_spread in MIN_SPREADS.items()}
    hue = np.hypot(z_scores["red"], z_scores["blue"])
    light, dark, contrast = measures.column("light"), measures.column("dark"), measures.column("contrast")
    criteria: tuple[tuple[str, str, np.ndarray, np.ndarray], ...] = (
        (
            "black",
            "more than half of the pixels have no light",
            (dark > MIN_CLIPPED_FRACTION) & (z_scores["dark"] > OUTLIER_Z_SCORE),
            dark,
        ),
        ("blank", "one grey value all over", contrast < MIN_CONTRAST, contrast),
        (
            "over-exposed",
            "more than half of the pixels are white",
            (light > MIN_CLIPPED_FRACTION) & (z_scores["light"] > OUTLIER_Z_SCORE),
            light,
        ),
        ("blurred", "far less sharp than the others", z_scores["sharpness"] < -BLUR_Z_SCORE, -z_scores["sharpness"]),
        (
            "noisy",
            "far more fine detail than the others",
            z_scores["sharpness"] > OUTLIER_Z_SCORE,
            z_scores["sharpness"],
        ),
        (
            "odd-coloured",
            "another colour than the others",
            (hue > OUTLIER_Z_SCORE) | (z_scores["saturation"] > OUTLIER_Z_SCORE),
            np.maximum(hue, z_scores["saturation"]),
        ),
        ("dark", "far darker than the others", z_scores["brightness"] < -OUTLIER_Z_SCORE, -z_scores["brightness"]),
        ("bright", "far lighter than the others", z_scores["brightness"] > OUTLIER_Z_SCORE, z_scores["brightness"]),
        ("flat", "far less contrast than the others", z_scores["contrast"] < -OUTLIER_Z_SCORE, -z_scores["contrast"]),
        ("harsh", "far more contrast than the others", z_scores["contrast"] > OUTLIER_Z_SCORE, z_scores["contrast"]),
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
    "black": "take them out, or scan them again",
    "blank": "take them out: there is nothing to learn from them",
    "over-exposed": "scan them again with less light, or take them out",
    "blurred": "scan them again in focus, or take them out",
    "noisy": "look whether they are images at all, and not scrambled",
    "odd-coloured": "look: another stain, a colour cast, or something else than a smear?",
}
OTHER_SOURCE_REMEDY = "so many are no slips but another stain, scanner or camera: ask whether they belong to the study"
DEFAULT_REMEDY = "look at them on the page; keep them if such images will come again"


def quality_findings(
    outliers: Sequence[OutlierGroup], measures: ImageMeasures, display_name: Callable[[int], str]
) -> Iterator[Finding]:
    """Nearly every image can not be an outlier, so what all have in common is told by itself."""
    num_images = len(measures.values)
    if (
        num_images
        and float(np.median(measures.column("brightness"))) < MIN_MEDIAN_BRIGHTNESS
        and float(np.median(measures.column("dark"))) < MIN_CLIPPED_FRACTION
    ):
        yield Finding(
            "look",
            "pixels",
            "the images are nearly black as a whole",
            "if they have 16 bits of which fewer are used (a 12-bit camera), scale them to the full range, all alike",
        )
    for group in outliers:
        message = f"{format_count(len(group.rows), 'image')} {'is' if len(group.rows) == 1 else 'are'} {group.kind}: {group.description}"
        names = tuple(display_name(int(row)) for row in group.rows)
        is_few = len(group.rows) <= max(MAX_OUTLIER_FRACTION * num_images, 3)
        yield Finding(
            "look",
            "pixels",
            message,
            REMEDIES.get(group.kind, DEFAULT_REMEDY) if is_few else OTHER_SOURCE_REMEDY,
            names,
        )


# Cheap figures of every image: enough to find the odd ones and the copies, in seconds for ten thousand cells.

IMAGES_PER_CHUNK = 256  # images a thread takes at a time
MAX_SIDE_PIXELS = 1024  # pixels a side: larger images are reduced first
MAX_DARK_GRAY, MIN_LIGHT_GRAY = 2, 253  # grey values that count as clipped
SKETCH_SIDE_PIXELS = 16  # pixels a side of what copies are compared by


@dataclass(frozen=True)
class ImageMeasures:
    """Of N images. `figures` has a column for each of FIGURES: brightness, contrast (standard deviation of grey) and
    saturation from 0 to 255; sharpness (log of the variance of the Laplacian, in units of the brightness, so that
    the dark are not called blurred); shares of clipped pixels, and of red and blue in the colour."""

    values: np.ndarray  # (N, 8) float32
    digest: np.ndarray  # (N,) of 16 bytes: equal for equal pixels
    perceptual_hash: np.ndarray  # (N, 8) uint16: 128 bits, whether it gets lighter to the right and downwards
    sketch: np.ndarray  # (N, SKETCH * SKETCH) uint8

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
    rightwards, downwards = (
        thumbnails[:, :8, 1:] > thumbnails[:, :8, :-1],
        thumbnails[:, 1:, :8] > thumbnails[:, :-1, :8],
    )
    bits = np.concatenate([rightwards.reshape(num_images, 64), downwards.reshape(num_images, 64)], axis=1)
    return ImageMeasures(values, digest, np.packbits(bits, axis=1).view(np.uint16), sketch)


def _measure_image(image: np.ndarray) -> tuple[tuple[float, ...], np.ndarray, np.ndarray]:
    """Figures; the 9 x 9 grey values that the hash is made of; the sketch."""
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
        red, blue = ((channels[c] + 1) / (sum(channels) + 3) for c in (0, 2))  # of black: a third each
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
    return (
        values,
        thumbnail,
        cv2.resize(gray, (SKETCH_SIDE_PIXELS, SKETCH_SIDE_PIXELS), interpolation=cv2.INTER_AREA).ravel(),
    )
