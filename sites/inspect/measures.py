"""Cheap figures of every image: enough to find the odd ones and the copies, in seconds for ten thousand cells."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from sites.inspect.findings import Tick, silent

CHUNK = 256  # images a thread takes at a time
LARGEST = 1024  # pixels a side: larger images are reduced first
DARK, LIGHT = 2, 253  # grey values that count as clipped
SKETCH = 16  # pixels a side of what copies are compared by
FIGURES = ("brightness", "contrast", "sharpness", "saturation", "dark", "light", "red", "blue")


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
