"""The types of red cells and their outlines, about the origin, with the area of the unit circle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from sites.data.renderer.polygons import (
    ANGLES,
    CIRCLE,
    VERTICES,
    Outline,
    bent,
    blob,
    cut,
    horned,
    normalised,
    pick,
    stretched,
    turned,
)
from sites.data.renderer.schistocyte_outlines import fragment

TYPES = (
    "normal",
    "macrocyte",
    "microcyte",
    "spherocyte",
    "target",
    "stomatocyte",
    "ovalocyte",
    "teardrop",
    "burr",
    "schistocyte",
    "hypochromia",
    "elliptocyte",
)


def outline(kind: str, rng: Generator) -> Outline:
    """Of a cell of the type `kind`, turned at random. A fragment is smaller than the unit circle."""
    if kind == "schistocyte":
        return turned(fragment(rng), pick(rng, 0, 2 * np.pi))
    shape = SHAPES[kind](rng)
    if rng.random() < 0.25:  # a neighbour or the drying film has flattened one side
        shape = cut(shape, pick(rng, 0, 2 * np.pi), pick(rng, 0.91, 0.985))
    return turned(normalised(shape), pick(rng, 0, 2 * np.pi))


def round_cell(rng: Generator) -> Outline:
    return stretched(blob(rng, 0.007 + 0.03 * rng.random() ** 3), 1 + abs(rng.normal(0, 0.07)))


def small_cell(rng: Generator) -> Outline:
    return stretched(blob(rng, 0.01 + 0.05 * rng.random() ** 2), 1 + abs(rng.normal(0, 0.1)))


def oval(rng: Generator) -> Outline:
    shape = stretched(blob(rng, pick(rng, 0.005, 0.03)), pick(rng, 1.2, 1.65))
    egg = 1 + pick(rng, -0.14, 0.14) * shape[:, 0]
    return bent(shape * np.stack([np.ones(VERTICES), egg], 1), rng.normal(0, 0.06))


def ellipse(rng: Generator) -> Outline:
    return bent(stretched(blob(rng, pick(rng, 0.005, 0.02)), pick(rng, 1.6, 3.0)), rng.normal(0, 0.08))


def drop(rng: Generator) -> Outline:
    if rng.random() < 0.6:  # a round body with a tail
        shape = horned(stretched(blob(rng, 0.025), pick(rng, 1, 1.4)), 0.0, pick(rng, 0.4, 1.3), pick(rng, 0.2, 0.5))
    else:  # tapering
        ahead = (1 + np.cos(ANGLES)) / 2
        x = np.cos(ANGLES) + pick(rng, 0.3, 1.1) * ahead ** pick(rng, 2, 6)
        y = np.sin(ANGLES) * (np.sin(ANGLES / 2) ** pick(rng, 0.3, 1.3) * 0.88 + 0.1)
        shape = np.stack([x, y], 1) + 0.4 * (blob(rng, 0.025) - CIRCLE)
    return bent(shape, rng.normal(0, 0.22))


def crenate(rng: Generator) -> Outline:
    count = int(rng.integers(8, 24))
    at = (np.arange(count) + rng.uniform(-0.35, 0.35, count)) * 2 * np.pi / count
    height = pick(rng, 0.08, 0.26) * rng.uniform(0.3, 1.2, count) * (12 / max(count, 12)) ** 0.5
    gap = np.abs((ANGLES[:, None] - at + np.pi) % (2 * np.pi) - np.pi) * (count / (2 * np.pi * pick(rng, 0.2, 0.36)))
    spicules = np.exp(-gap * np.sqrt(gap)) @ height
    return stretched(blob(rng, 0.03) * (1 + spicules)[:, None], 1 + abs(rng.normal(0, 0.12)))


SHAPES: dict[str, Callable[[Generator], Outline]] = {
    **dict.fromkeys(("normal", "macrocyte", "spherocyte", "target", "stomatocyte", "hypochromia"), round_cell),
    "microcyte": small_cell,
    "ovalocyte": oval,
    "teardrop": drop,
    "burr": crenate,
    "elliptocyte": ellipse,
}
