"""Schistocytes: helmets, triangles, crescents, horned and torn cells, in about the mix of real smears."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from sites.data.renderer.polygons import (
    VERTICES,
    Outline,
    bent,
    bitten,
    blob,
    cut,
    horned,
    normalised,
    pick,
    pinched,
    pointed,
    ragged,
    rounded,
    stretched,
)


def helmet(rng: Generator) -> Outline:
    shape = stretched(blob(rng, 0.04), pick(rng, 1, 1.35))
    radius = pick(rng, 0.5, 1.6)
    return bitten(shape, rng.normal(0, 1) + np.pi / 2, pick(rng, 0.45, 1.0) * min(1.0, radius), radius)


def half(rng: Generator) -> Outline:
    shape = cut(blob(rng, 0.05), pick(rng, 0, 6.3), pick(rng, -0.1, 0.5))
    return bitten(shape, pick(rng, 0, 6.3), 0.1, 0.6) if rng.random() < 0.3 else shape


def triangle(rng: Generator) -> Outline:
    shape, angle = blob(rng, 0.06), pick(rng, 0, 6.3)
    for _ in range(3):
        keep = pick(rng, 0.4, 0.75)
        shape = cut(shape, angle, keep) if rng.random() < 0.6 else bitten(shape, angle, 1 - keep, pick(rng, 1, 3))
        angle += pick(rng, 1.7, 2.5)
    return stretched(shape, pick(rng, 1, 1.4))


def crescent(rng: Generator) -> Outline:
    shape = stretched(blob(rng, 0.07), pick(rng, 1.7, 3.8))
    shape = pointed(shape, pick(rng, 0, 0.8)) if rng.random() < 0.5 else shape
    return bent(shape * np.stack([np.ones(VERTICES), 1 + pick(rng, -0.3, 0.3) * shape[:, 0]], 1), pick(rng, 0.35, 1.15))


def leaf(rng: Generator) -> Outline:
    shape = pointed(stretched(blob(rng, 0.05), pick(rng, 1.2, 2.6)), pick(rng, 0.3, 1.1))
    return bent(shape, rng.normal(0, 0.25))


def lobed(rng: Generator) -> Outline:
    shape = stretched(blob(rng, 0.08), pick(rng, 1.3, 2.6))
    shape = pinched(shape, pick(rng, 0.4, 0.8), pick(rng, 0.25, 0.6), rng.normal(0, 0.5))
    return bent(shape, rng.normal(0, 0.35))


def keratocyte(rng: Generator) -> Outline:
    """Two horns beside a notch."""
    angle, wide = pick(rng, -np.pi, np.pi), pick(rng, 0.25, 0.6)
    shape = bitten(blob(rng, 0.04), angle, pick(rng, 0.3, 0.65), pick(rng, 0.3, 0.65))
    for side in (-1, 1):
        if rng.random() < 0.75:
            shape = horned(shape, angle + side * wide, pick(rng, 0.1, 0.45), pick(rng, 0.1, 0.2))
    return shape


def nibbed(rng: Generator) -> Outline:
    """Nearly whole, with a corner, a nib or a small tooth."""
    shape, angle = stretched(blob(rng, 0.035), pick(rng, 1, 1.3)), pick(rng, -np.pi, np.pi)
    shape = horned(shape, angle, pick(rng, 0.2, 0.6), pick(rng, 0.12, 0.35))
    if rng.random() < 0.5:
        shape = cut(shape, angle + rng.choice([-1, 1]) * pick(rng, 0.5, 1.2), pick(rng, 0.6, 0.9))
    return shape


def kidney(rng: Generator) -> Outline:
    """Folded or dented: a smooth deep bay on one side."""
    shape = bent(stretched(blob(rng, 0.05), pick(rng, 1.4, 2.3)), pick(rng, 0.4, 0.95))
    return bitten(shape, rng.normal(np.pi / 2, 0.4), pick(rng, 0.1, 0.45), pick(rng, 0.3, 0.7))


def spiked(rng: Generator) -> Outline:
    shape = blob(rng, 0.07)
    for _ in range(int(rng.integers(1, 4))):
        shape = horned(shape, pick(rng, -np.pi, np.pi), pick(rng, 0.3, 0.9), pick(rng, 0.15, 0.4))
    return shape


def torn(rng: Generator) -> Outline:
    shape = ragged(blob(rng, pick(rng, 0.08, 0.16), fade=0.75), rng, pick(rng, 0.01, 0.05))
    return stretched(shape, pick(rng, 1, 2.2))


def angular(rng: Generator) -> Outline:
    shape, angle = stretched(blob(rng, 0.06), pick(rng, 1, 1.5)), pick(rng, 0, 6.3)
    for _ in range(int(rng.integers(2, 5))):
        shape = cut(shape, angle, pick(rng, 0.55, 0.85))
        angle += pick(rng, 0.8, 2.2)
    return shape


def lump(rng: Generator) -> Outline:
    """Nearly a small spherocyte, or a budding one."""
    shape = stretched(blob(rng, 0.05), pick(rng, 1, 1.35))
    return horned(shape, 0.0, pick(rng, 0.15, 0.5), pick(rng, 0.2, 0.5)) if rng.random() < 0.8 else shape


FRAGMENTS: tuple[tuple[Callable[[Generator], Outline], float, float], ...] = (
    # share, radius (1: a normal cell's), both by eye from real smears
    (helmet, 0.16, 0.82),
    (half, 0.07, 0.76),
    (triangle, 0.07, 0.70),
    (crescent, 0.07, 0.68),
    (leaf, 0.08, 0.78),
    (lobed, 0.07, 0.76),
    (kidney, 0.08, 0.86),
    (keratocyte, 0.11, 0.94),
    (nibbed, 0.13, 0.90),
    (spiked, 0.05, 0.72),
    (torn, 0.08, 0.85),
    (angular, 0.05, 0.85),
    (lump, 0.03, 0.58),
)
FRAGMENT_SHARES = np.cumsum([share for _, share, _ in FRAGMENTS])


def fragment(rng: Generator) -> Outline:
    draw, _, radius = FRAGMENTS[int(np.searchsorted(FRAGMENT_SHARES, rng.random() * FRAGMENT_SHARES[-1]))]
    shape = normalised(rounded(normalised(draw(rng)), pick(rng, 10, 34)))
    return radius * (ragged(shape, rng, pick(rng, 0.005, 0.025)) if rng.random() < 0.3 else shape)
