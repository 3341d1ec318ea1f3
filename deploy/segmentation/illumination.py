"""How much light each pixel swallows: the photograph against the glass beside the cells, wherever the lamp is uneven."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float32]
Mask = NDArray[np.uint8]  # 0 or 1

WEIGHTS = (0.15, 0.6, 0.25)  # R, G, B: haemoglobin swallows green most, red hardly
SMALL = 120  # the lamp is smooth: it is fitted to a copy of this longest side, or to blocks of it
NOISE = 0.004  # no camera is better than this, in optical density


@dataclass(frozen=True)
class Light:
    density: NDArray[np.float32]  # (H, W, 3) natural optical density: 0 on the glass, more in cells
    signal: Plane  # (H, W) the three weighted
    noise: float  # of the signal on the glass
    glass: tuple[float, float, float]  # RGB


def correct(image: NDArray[np.uint8], blur: float, block: float | None = None) -> Light:
    """Optical density with the lamp divided out; `blur` is the sigma of a smoothing, in pixels.

    With a `block`, in pixels, the lamp is that of many overlapping blocks of this side: one surface fits no stitched
    field, and on a copy of a whole large field glass and cells would melt into each other.
    """
    logs = np.log(_smooth(image.astype(np.float32), blur) + 1)
    high, wide = logs.shape[:2]
    scale = min(1.0, SMALL / (block or max(high, wide)))
    size = max(1, round(wide * scale)), max(1, round(high * scale))
    small = cv2.resize(logs, size, interpolation=cv2.INTER_AREA).reshape(size[1], size[0], 3)
    lamp, bare = _lamps(small) if block else _lamp(small)
    # so smooth a surface is cheap to find small and enlarge: its error between samples is far below the noise
    density = cv2.resize(lamp.astype(np.float32), (wide, high), interpolation=cv2.INTER_LINEAR) - logs
    # arrows and scale bars burned in are brighter than glass in some colour; no cell is in green
    signal = np.minimum(density @ np.array(WEIGHTS, np.float32), 1.2 * density[..., 1])
    spots = cv2.resize(bare.astype(np.uint8), (wide, high), interpolation=cv2.INTER_NEAREST) > 0
    bright = -signal[spots & (signal < 0)]  # pallor is among the darker half
    noise = max(NOISE, 1.48 * float(np.median(bright))) if bright.size else NOISE
    glass = np.exp(np.median(small[bare], axis=0)) - 1
    return Light(density, signal, noise, (float(glass[0]), float(glass[1]), float(glass[2])))


def _smooth(image: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    return cv2.GaussianBlur(image, (0, 0), sigma) if sigma > 0.2 else image


def _terms(high: int, wide: int) -> NDArray[np.float64]:
    """(H, W, 6): 1, x, y, xx, xy, yy over [-1, 1]."""
    y, x = np.mgrid[-1 : 1 : high * 1j, -1 : 1 : wide * 1j] if high > 1 and wide > 1 else np.zeros((2, high, wide))
    return np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], -1)


def _lamps(logs: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """`_lamp` of blocks that overlap by half or more, each fading out from its middle."""
    high, wide = logs.shape[:2]
    lamp, bare, total = np.zeros(logs.shape), np.zeros((high, wide)), np.zeros((high, wide))
    for y in _starts(high):
        for x in _starts(wide):
            here = slice(y, y + SMALL), slice(x, x + SMALL)
            surface, glass = _lamp(logs[here])
            weight = np.outer(np.hanning(glass.shape[0] + 2)[1:-1], np.hanning(glass.shape[1] + 2)[1:-1])
            lamp[here] += surface * weight[..., None]
            bare[here] += glass * weight
            total[here] += weight
    share = bare / total
    return lamp / total[..., None], share > share.max() / 2  # never none at all


def _starts(length: int) -> list[int]:
    """Where blocks begin, evenly spread, the last one flush with the end."""
    rest = max(0, length - SMALL)
    steps = -(-2 * rest // SMALL)
    return [round(rest * n / max(steps, 1)) for n in range(steps + 1)]


def _lamp(logs: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The light of the glass (H, W, 3), and which pixels are glass."""
    surface, bare = _surface(logs, _terms(*logs.shape[:2]))
    return surface + _ripple(logs - surface, bare), bare


def _surface(logs: NDArray[np.float32], terms: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The glass as a quadratic surface (H, W, 3), and which pixels are glass.

    Cells only darken: a fit that hardly listens to what lies below it comes to lie on the glass; then what is near
    it decides.
    """
    grey = logs @ np.array(WEIGHTS, np.float32)
    fit = np.full(grey.shape, float(np.quantile(grey, 0.9)))
    for turn in range(10):
        fit = _fit(grey, np.where(fit > grey + NOISE, 0.02, 1.0), terms[..., : 3 if turn < 5 else 6])
    bare = np.abs(fit - grey) < 0.1
    for _ in range(6):
        left = fit - grey  # density
        above = left[(left < 0) & (left > -0.1)]
        spread = max(NOISE, 1.48 * float(np.median(-above))) if above.size > 20 else NOISE
        keep = (left < 2.5 * spread) & (left > -3.5 * spread)
        if keep.sum() < max(12, 0.02 * keep.size):
            break
        bare = keep
        fit = _fit(grey, bare, terms)
    if not bare.any():
        bare = np.ones(grey.shape, bool)
    surfaces = [_fit(logs[..., c], bare, terms) for c in range(3)]
    return np.stack(surfaces, -1), bare


def _ripple(left: NDArray[np.float64], bare: NDArray[np.bool_]) -> NDArray[np.float64]:
    """What the quadratic leaves: the mean of the glass nearby, nothing where no glass is near."""
    sigma = max(left.shape[:2]) / 12
    weight = cv2.GaussianBlur(bare.astype(np.float64), (0, 0), sigma)
    return np.asarray(cv2.GaussianBlur(left * bare[..., None], (0, 0), sigma) / (weight[..., None] + 0.03))


def _fit(
    values: NDArray[np.float32], weights: NDArray[np.float64] | NDArray[np.bool_], terms: NDArray[np.float64]
) -> NDArray[np.float64]:
    where = weights > 0
    a, b, w = terms[where], values[where], weights[where].astype(float)
    ridge = 1e-3 * w.sum() * np.diag([0.0, *[1.0] * (terms.shape[-1] - 1)])  # few bare places: stay flat
    weighed = a * w[:, None]
    return np.asarray(terms @ np.linalg.solve(weighed.T @ a + ridge, weighed.T @ b))
