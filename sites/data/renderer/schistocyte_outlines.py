"""Schistocytes: helmets, triangles, crescents, keratocytes and others, in about the proportions of real smears."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from sites.data.renderer.polygons import (
    NUM_VERTICES,
    CellOutline,
    add_horn,
    bend_outline,
    bite_outline,
    cut_straight,
    normalize_area,
    pinch_waist,
    rough_circle,
    roughen_edge,
    sample_uniform,
    smooth_outline,
    stretch_outline,
    taper_ends,
)


def helmet_outline(rng: Generator) -> CellOutline:
    shape = stretch_outline(rough_circle(rng, 0.04), sample_uniform(rng, 1, 1.35))
    radius = sample_uniform(rng, 0.5, 1.6)
    return bite_outline(shape, rng.normal(0, 1) + np.pi / 2, sample_uniform(rng, 0.45, 1.0) * min(1.0, radius), radius)


def half_disc_outline(rng: Generator) -> CellOutline:
    shape = cut_straight(rough_circle(rng, 0.05), sample_uniform(rng, 0, 6.3), sample_uniform(rng, -0.1, 0.5))
    return bite_outline(shape, sample_uniform(rng, 0, 6.3), 0.1, 0.6) if rng.random() < 0.3 else shape


def triangle_outline(rng: Generator) -> CellOutline:
    shape, angle = rough_circle(rng, 0.06), sample_uniform(rng, 0, 6.3)
    for _ in range(3):
        keep_fraction = sample_uniform(rng, 0.4, 0.75)
        shape = (
            cut_straight(shape, angle, keep_fraction)
            if rng.random() < 0.6
            else bite_outline(shape, angle, 1 - keep_fraction, sample_uniform(rng, 1, 3))
        )
        angle += sample_uniform(rng, 1.7, 2.5)
    return stretch_outline(shape, sample_uniform(rng, 1, 1.4))


def crescent_outline(rng: Generator) -> CellOutline:
    shape = stretch_outline(rough_circle(rng, 0.07), sample_uniform(rng, 1.7, 3.8))
    shape = taper_ends(shape, sample_uniform(rng, 0, 0.8)) if rng.random() < 0.5 else shape
    return bend_outline(
        shape * np.stack([np.ones(NUM_VERTICES), 1 + sample_uniform(rng, -0.3, 0.3) * shape[:, 0]], 1),
        sample_uniform(rng, 0.35, 1.15),
    )


def leaf_outline(rng: Generator) -> CellOutline:
    shape = taper_ends(
        stretch_outline(rough_circle(rng, 0.05), sample_uniform(rng, 1.2, 2.6)), sample_uniform(rng, 0.3, 1.1)
    )
    return bend_outline(shape, rng.normal(0, 0.25))


def lobed_outline(rng: Generator) -> CellOutline:
    shape = stretch_outline(rough_circle(rng, 0.08), sample_uniform(rng, 1.3, 2.6))
    shape = pinch_waist(shape, sample_uniform(rng, 0.4, 0.8), sample_uniform(rng, 0.25, 0.6), rng.normal(0, 0.5))
    return bend_outline(shape, rng.normal(0, 0.35))


def keratocyte_outline(rng: Generator) -> CellOutline:
    """Two horns next to a notch."""
    angle, half_width = sample_uniform(rng, -np.pi, np.pi), sample_uniform(rng, 0.25, 0.6)
    shape = bite_outline(rough_circle(rng, 0.04), angle, sample_uniform(rng, 0.3, 0.65), sample_uniform(rng, 0.3, 0.65))
    for side in (-1, 1):
        if rng.random() < 0.75:
            shape = add_horn(
                shape, angle + side * half_width, sample_uniform(rng, 0.1, 0.45), sample_uniform(rng, 0.1, 0.2)
            )
    return shape


def nibbed_outline(rng: Generator) -> CellOutline:
    """Nearly complete, with a corner, a nib or a small tooth."""
    shape = stretch_outline(rough_circle(rng, 0.035), sample_uniform(rng, 1, 1.3))
    angle = sample_uniform(rng, -np.pi, np.pi)
    shape = add_horn(shape, angle, sample_uniform(rng, 0.2, 0.6), sample_uniform(rng, 0.12, 0.35))
    if rng.random() < 0.5:
        shape = cut_straight(
            shape, angle + rng.choice([-1, 1]) * sample_uniform(rng, 0.5, 1.2), sample_uniform(rng, 0.6, 0.9)
        )
    return shape


def kidney_outline(rng: Generator) -> CellOutline:
    """Folded or dented: a smooth deep bay on one side."""
    shape = bend_outline(
        stretch_outline(rough_circle(rng, 0.05), sample_uniform(rng, 1.4, 2.3)), sample_uniform(rng, 0.4, 0.95)
    )
    return bite_outline(
        shape, rng.normal(np.pi / 2, 0.4), sample_uniform(rng, 0.1, 0.45), sample_uniform(rng, 0.3, 0.7)
    )


def spiked_outline(rng: Generator) -> CellOutline:
    shape = rough_circle(rng, 0.07)
    for _ in range(int(rng.integers(1, 4))):
        shape = add_horn(
            shape, sample_uniform(rng, -np.pi, np.pi), sample_uniform(rng, 0.3, 0.9), sample_uniform(rng, 0.15, 0.4)
        )
    return shape


def torn_outline(rng: Generator) -> CellOutline:
    shape = roughen_edge(
        rough_circle(rng, sample_uniform(rng, 0.08, 0.16), decay=0.75), rng, sample_uniform(rng, 0.01, 0.05)
    )
    return stretch_outline(shape, sample_uniform(rng, 1, 2.2))


def angular_outline(rng: Generator) -> CellOutline:
    shape, angle = stretch_outline(rough_circle(rng, 0.06), sample_uniform(rng, 1, 1.5)), sample_uniform(rng, 0, 6.3)
    for _ in range(int(rng.integers(2, 5))):
        shape = cut_straight(shape, angle, sample_uniform(rng, 0.55, 0.85))
        angle += sample_uniform(rng, 0.8, 2.2)
    return shape


def microspherocyte_outline(rng: Generator) -> CellOutline:
    """Like a small spherocyte, often with a bud."""
    shape = stretch_outline(rough_circle(rng, 0.05), sample_uniform(rng, 1, 1.35))
    return (
        add_horn(shape, 0.0, sample_uniform(rng, 0.15, 0.5), sample_uniform(rng, 0.2, 0.5))
        if rng.random() < 0.8
        else shape
    )


SCHISTOCYTE_SHAPES: tuple[tuple[Callable[[Generator], CellOutline], float, float], ...] = (
    # fraction, radius (1: that of a normal cell); both estimated by eye from real smears
    (helmet_outline, 0.16, 0.82),
    (half_disc_outline, 0.07, 0.76),
    (triangle_outline, 0.07, 0.70),
    (crescent_outline, 0.07, 0.68),
    (leaf_outline, 0.08, 0.78),
    (lobed_outline, 0.07, 0.76),
    (kidney_outline, 0.08, 0.86),
    (keratocyte_outline, 0.11, 0.94),
    (nibbed_outline, 0.13, 0.90),
    (spiked_outline, 0.05, 0.72),
    (torn_outline, 0.08, 0.85),
    (angular_outline, 0.05, 0.85),
    (microspherocyte_outline, 0.03, 0.58),
)
CUMULATIVE_FRACTIONS = np.cumsum([fraction for _, fraction, _ in SCHISTOCYTE_SHAPES])


def schistocyte_outline(rng: Generator) -> CellOutline:
    sample_shape, _, radius = SCHISTOCYTE_SHAPES[
        int(np.searchsorted(CUMULATIVE_FRACTIONS, rng.random() * CUMULATIVE_FRACTIONS[-1]))
    ]
    shape = normalize_area(smooth_outline(normalize_area(sample_shape(rng)), sample_uniform(rng, 10, 34)))
    return radius * (roughen_edge(shape, rng, sample_uniform(rng, 0.005, 0.025)) if rng.random() < 0.3 else shape)
