"""The types of red cells and their outlines, centred on the origin and with the area of the unit circle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from sites.data.renderer.polygons import (
    ANGLES,
    NUM_VERTICES,
    UNIT_CIRCLE,
    CellOutline,
    add_horn,
    bend_outline,
    cut_straight,
    normalize_area,
    rotate_outline,
    rough_circle,
    sample_uniform,
    stretch_outline,
)
from sites.data.renderer.schistocyte_outlines import schistocyte_outline

CELL_TYPES = (
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


def sample_outline(cell_type: str, rng: Generator) -> CellOutline:
    """A random outline of a cell of this type, randomly rotated. Schistocytes are smaller than the unit circle."""
    if cell_type == "schistocyte":
        return rotate_outline(schistocyte_outline(rng), sample_uniform(rng, 0, 2 * np.pi))
    shape = OUTLINE_BY_TYPE[cell_type](rng)
    if rng.random() < 0.25:  # a neighbour or the drying film has flattened one side
        shape = cut_straight(shape, sample_uniform(rng, 0, 2 * np.pi), sample_uniform(rng, 0.91, 0.985))
    return rotate_outline(normalize_area(shape), sample_uniform(rng, 0, 2 * np.pi))


def round_outline(rng: Generator) -> CellOutline:
    return stretch_outline(rough_circle(rng, 0.007 + 0.03 * rng.random() ** 3), 1 + abs(rng.normal(0, 0.07)))


def microcyte_outline(rng: Generator) -> CellOutline:
    return stretch_outline(rough_circle(rng, 0.01 + 0.05 * rng.random() ** 2), 1 + abs(rng.normal(0, 0.1)))


def ovalocyte_outline(rng: Generator) -> CellOutline:
    shape = stretch_outline(rough_circle(rng, sample_uniform(rng, 0.005, 0.03)), sample_uniform(rng, 1.2, 1.65))
    taper = 1 + sample_uniform(rng, -0.14, 0.14) * shape[:, 0]
    return bend_outline(shape * np.stack([np.ones(NUM_VERTICES), taper], 1), rng.normal(0, 0.06))


def elliptocyte_outline(rng: Generator) -> CellOutline:
    return bend_outline(
        stretch_outline(rough_circle(rng, sample_uniform(rng, 0.005, 0.02)), sample_uniform(rng, 1.6, 3.0)),
        rng.normal(0, 0.08),
    )


def teardrop_outline(rng: Generator) -> CellOutline:
    if rng.random() < 0.6:  # a round body with a tail
        shape = add_horn(
            stretch_outline(rough_circle(rng, 0.025), sample_uniform(rng, 1, 1.4)),
            0.0,
            sample_uniform(rng, 0.4, 1.3),
            sample_uniform(rng, 0.2, 0.5),
        )
    else:  # a body that tapers into the tail
        front_weight = (1 + np.cos(ANGLES)) / 2
        x = np.cos(ANGLES) + sample_uniform(rng, 0.3, 1.1) * front_weight ** sample_uniform(rng, 2, 6)
        y = np.sin(ANGLES) * (np.sin(ANGLES / 2) ** sample_uniform(rng, 0.3, 1.3) * 0.88 + 0.1)
        shape = np.stack([x, y], 1) + 0.4 * (rough_circle(rng, 0.025) - UNIT_CIRCLE)
    return bend_outline(shape, rng.normal(0, 0.22))


def burr_outline(rng: Generator) -> CellOutline:
    num_spicules = int(rng.integers(8, 24))
    jitter = rng.uniform(-0.35, 0.35, num_spicules)
    spicule_angles = (np.arange(num_spicules) + jitter) * 2 * np.pi / num_spicules
    height = sample_uniform(rng, 0.08, 0.26) * rng.uniform(0.3, 1.2, num_spicules) * (12 / max(num_spicules, 12)) ** 0.5
    # (vertices, spicules): angular distance, in widths of a spicule
    gap = np.abs((ANGLES[:, None] - spicule_angles + np.pi) % (2 * np.pi) - np.pi) * (
        num_spicules / (2 * np.pi * sample_uniform(rng, 0.2, 0.36))
    )
    spicules = np.exp(-gap * np.sqrt(gap)) @ height
    return stretch_outline(rough_circle(rng, 0.03) * (1 + spicules)[:, None], 1 + abs(rng.normal(0, 0.12)))


OUTLINE_BY_TYPE: dict[str, Callable[[Generator], CellOutline]] = {
    **dict.fromkeys(("normal", "macrocyte", "spherocyte", "target", "stomatocyte", "hypochromia"), round_outline),
    "microcyte": microcyte_outline,
    "ovalocyte": ovalocyte_outline,
    "teardrop": teardrop_outline,
    "burr": burr_outline,
    "elliptocyte": elliptocyte_outline,
}
