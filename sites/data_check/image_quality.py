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

from sites.data_check.findings import Finding, Tick, count, silent

FIGURES = ("brightness", "contrast", "sharpness", "saturation", "dark", "light", "red", "blue")
FAR = 6.0  # robust standard deviations
SOFT = 3.5  # of sharpness: at most 1 in 1,000 of Chula's, BCCD's and MP-IDB's cells is less sharp
MANY = 0.02  # share of a site's images
BLANK = 2.0  # contrast, of 255
MOSTLY = 0.5  # share of clipped pixels
NIGHT = 25.0  # median brightness of a site whose pixels do not use their range
# a spread is never taken for smaller than this, so that images which are all alike do not make tiny differences odd
LEAST = dict(zip(FIGURES, (4.0, 2.0, 0.25, 4.0, 0.02, 0.02, 0.01, 0.01), strict=True))


@dataclass(frozen=True)
class Odd:
    """The rows of one kind, most striking first, with how many spreads they lie off (or a share, or a contrast)."""

    kind: str
    means: str
    rows: np.ndarray
    values: np.ndarray

    def json(self, names: Sequence[str]) -> dict[str, Any]:
        images = [{"image": names[r], "value": round(float(v), 3)} for r, v in zip(self.rows, self.values, strict=True)]
        return {"kind": self.kind, "means": self.means, "count": len(self.rows), "images": images}


def spreads_off(values: np.ndarray, least: float) -> np.ndarray:
    """Robust z-scores: 1.4826 median absolute deviations are a standard deviation of normal values."""
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return np.asarray((values - middle) / max(spread, least))


def odd_ones(measures: Measures) -> list[Odd]:
    """Every image has at most one kind: the first in this order."""
    if not len(measures.figures):
        return []
    off = {name: spreads_off(measures.of(name), least) for name, least in LEAST.items()}
    hue = np.hypot(off["red"], off["blue"])
    light, dark, contrast = measures.of("light"), measures.of("dark"), measures.of("contrast")
    tests: tuple[tuple[str, str, np.ndarray, np.ndarray], ...] = (
        ("black", "more than half of the pixels have no light", (dark > MOSTLY) & (off["dark"] > FAR), dark),
        ("blank", "one grey value all over", contrast < BLANK, contrast),
        ("over-exposed", "more than half of the pixels are white", (light > MOSTLY) & (off["light"] > FAR), light),
        ("blurred", "far less sharp than the others", off["sharpness"] < -SOFT, -off["sharpness"]),
        ("noisy", "far more fine detail than the others", off["sharpness"] > FAR, off["sharpness"]),
        ("odd-coloured", "another colour than the others", (hue > FAR) | (off["saturation"] > FAR),
         np.maximum(hue, off["saturation"])),
        ("dark", "far darker than the others", off["brightness"] < -FAR, -off["brightness"]),
        ("bright", "far lighter than the others", off["brightness"] > FAR, off["brightness"]),
        ("flat", "far less contrast than the others", off["contrast"] < -FAR, -off["contrast"]),
        ("harsh", "far more contrast than the others", off["contrast"] > FAR, off["contrast"]),
    )  # fmt: skip
    found, taken = [], np.zeros(len(contrast), bool)
    for kind, means, is_so, value in tests:
        rows = np.flatnonzero(is_so & ~taken)
        taken[rows] = True
        if len(rows):
            rows = rows[np.argsort(-value[rows], kind="stable")]
            found.append(Odd(kind, means, rows, value[rows]))
    return found


CURES = {
    "black": "take them out, or scan them again",
    "blank": "take them out: there is nothing to learn from them",
    "over-exposed": "scan them again with less light, or take them out",
    "blurred": "scan them again in focus, or take them out",
    "noisy": "look whether they are images at all, and not scrambled",
    "odd-coloured": "look: another stain, a colour cast, or something else than a smear?",
}
SECOND = "so many are no slips but another stain, scanner or camera: ask whether they belong to the study"
LOOK = "look at them on the page; keep them if such images will come again"


def findings(odd: Sequence[Odd], measures: Measures, shown: Callable[[int], str]) -> Iterator[Finding]:
    """Nearly every image can not be an outlier, so what all have in common is told by itself."""
    number = len(measures.figures)
    if (
        number
        and float(np.median(measures.of("brightness"))) < NIGHT
        and float(np.median(measures.of("dark"))) < MOSTLY
    ):
        yield Finding(
            "look", "pixels", "the images are nearly black as a whole",
            "if they have 16 bits of which fewer are used (a 12-bit camera), scale them to the full range, all alike",
        )  # fmt: skip
    for one in odd:
        what = f"{count(len(one.rows), 'image')} {'is' if len(one.rows) == 1 else 'are'} {one.kind}: {one.means}"
        names = tuple(shown(int(row)) for row in one.rows)
        slips = len(one.rows) <= max(MANY * number, 3)
        yield Finding("look", "pixels", what, CURES.get(one.kind, LOOK) if slips else SECOND, names)


# Cheap figures of every image: enough to find the odd ones and the copies, in seconds for ten thousand cells.

CHUNK = 256  # images a thread takes at a time
LARGEST = 1024  # pixels a side: larger images are reduced first
DARK, LIGHT = 2, 253  # grey values that count as clipped
SKETCH = 16  # pixels a side of what copies are compared by


@dataclass(frozen=True)
class Measures:
    """Of N images. `figures` has a column for each of FIGURES: brightness, contrast (standard deviation of grey) and
    saturation from 0 to 255; sharpness (log of the variance of the Laplacian, in units of the brightness, so that
    the dark are not called blurred); shares of clipped pixels, and of red and blue in the colour."""

    figures: np.ndarray  # (N, 8) float32
    digest: np.ndarray  # (N,) of 16 bytes: equal for equal pixels
    hash: np.ndarray  # (N, 8) uint16: 128 bits, whether it gets lighter to the right and downwards
    sketch: np.ndarray  # (N, SKETCH * SKETCH) uint8

    def of(self, figure: str) -> np.ndarray:
        return self.figures[:, FIGURES.index(figure)]


def measure(x: np.ndarray, tick: Tick = silent) -> Measures:
    """x: (N, C, H, W) uint8 with one or three channels."""
    count = len(x)
    figures = np.zeros((count, len(FIGURES)), np.float32)
    digest = np.zeros(count, "V16")
    small = np.zeros((count, 9, 9), np.int16)
    sketch = np.zeros((count, SKETCH * SKETCH), np.uint8)

    def part(first: int) -> None:
        for at in range(first, min(first + CHUNK, count)):
            figures[at], small[at], sketch[at] = _one(x[at])
            digest[at] = np.void(hashlib.blake2b(x[at].tobytes(), digest_size=16).digest())

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for done, _ in enumerate(pool.map(part, range(0, count, CHUNK)), 1):
            tick("measuring images", min(done * CHUNK, count), count)
    rightwards, downwards = small[:, :8, 1:] > small[:, :8, :-1], small[:, 1:, :8] > small[:, :-1, :8]
    bits = np.concatenate([rightwards.reshape(count, 64), downwards.reshape(count, 64)], axis=1)
    return Measures(figures, digest, np.packbits(bits, axis=1).view(np.uint16), sketch)


def _one(image: np.ndarray) -> tuple[tuple[float, ...], np.ndarray, np.ndarray]:
    """Figures; the 9 x 9 grey values that the hash is made of; the sketch."""
    import cv2

    pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
    if max(pixels.shape[:2]) > LARGEST:
        scale = LARGEST / max(pixels.shape[:2])
        pixels = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
    colour = pixels.shape[2] == 3
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY) if colour else pixels[:, :, 0]
    mean, spread = cv2.meanStdDev(grey)
    edges = cv2.meanStdDev(cv2.Laplacian(grey, cv2.CV_16S))[1][0, 0] ** 2
    saturation, red, blue = 0.0, 1 / 3, 1 / 3
    if colour:
        saturation = cv2.mean(cv2.extractChannel(cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV), 1))[0]
        channels = cv2.mean(pixels)[:3]
        red, blue = ((channels[c] + 1) / (sum(channels) + 3) for c in (0, 2))  # of black: a third each
    dark, light = (np.count_nonzero(part) / grey.size for part in (grey <= DARK, grey >= LIGHT))
    figures = (
        mean[0, 0],
        spread[0, 0],
        np.log((edges + 0.1) / (mean[0, 0] ** 2 + 1)),
        saturation,
        dark,
        light,
        red,
        blue,
    )
    small = cv2.resize(grey, (9, 9), interpolation=cv2.INTER_AREA)
    return figures, small, cv2.resize(grey, (SKETCH, SKETCH), interpolation=cv2.INTER_AREA).ravel()
