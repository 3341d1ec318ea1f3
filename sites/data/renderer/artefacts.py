"""What is on a slide besides red cells: platelets, white cells, stain precipitate, droplets, scratches, a scale bar."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.random import Generator

from sites.data.renderer.polygons import rough_circle
from sites.data.renderer.rasterize import (
    AZURE_LAYER,
    DIRT_LAYER,
    add_patch,
    outline_depth,
    sample_smooth_noise,
    smoothstep,
)


def draw_artifacts(layers: np.ndarray, rng: Generator) -> None:
    """Adds a random selection of artefacts to `layers` (3, H, W), in place."""
    for _ in range(rng.poisson(2.5)):
        draw_platelet(layers, rng)
    if rng.random() < 0.12:
        draw_white_cell(layers, rng)
    if rng.random() < 0.35:
        for _ in range(rng.poisson(8)):
            draw_precipitate(layers, rng)
    for _ in range(rng.poisson(1.2)):
        draw_droplet(layers, rng)
    if rng.random() < 0.02:
        draw_scratch(layers, rng)
    if rng.random() < 0.1:
        draw_scale_bar(layers, rng)


def sample_position(layers: np.ndarray, rng: Generator) -> tuple[int, int]:
    return int(rng.integers(layers.shape[2])), int(rng.integers(layers.shape[1]))


def rough_disc(rng: Generator, radius: float, roughness: float, edge: float) -> np.ndarray:
    """(height, width) float32: 1 inside a rough circle of this radius in pixels, falling to 0 over `edge` pixels."""
    return smoothstep(0, edge, outline_depth(rough_circle(rng, roughness) * radius))


def draw_platelet(layers: np.ndarray, rng: Generator) -> None:
    x, y = sample_position(layers, rng)
    for _ in range(1 if rng.random() < 0.8 else int(rng.integers(2, 6))):  # sometimes in a clump
        patch = rough_disc(rng, rng.uniform(3, 6.5), 0.12, 3)
        patch *= (1 + 0.35 * sample_smooth_noise(rng, patch.shape)) * rng.uniform(0.25, 0.75)
        add_patch(layers, patch, x, y, AZURE_LAYER)
        x, y = x + int(rng.normal(0, 12)), y + int(rng.normal(0, 12))


def draw_white_cell(layers: np.ndarray, rng: Generator) -> None:
    x, y = sample_position(layers, rng)
    radius = rng.uniform(27, 38)
    body = rough_disc(rng, radius, 0.03, 4)
    add_patch(
        layers, body * (1 + 0.3 * sample_smooth_noise(rng, body.shape)) * rng.uniform(0.1, 0.3), x, y, AZURE_LAYER
    )
    angle = rng.uniform(0, 2 * np.pi)
    lobes = int(rng.integers(1, 5))
    nucleus = np.zeros_like(body)[None]
    for _ in range(lobes):
        lobe = rough_disc(rng, radius * (0.72 if lobes == 1 else 0.36), 0.1, 3)
        distance = radius * (0.1 if lobes == 1 else 0.45)
        angle += rng.uniform(0.8, 1.5)
        center = body.shape[1] // 2 + int(distance * np.cos(angle)), body.shape[0] // 2 + int(distance * np.sin(angle))
        add_patch(nucleus, lobe, *center, 0)
    nucleus = np.minimum(nucleus[0], 1) * (1 + 0.12 * sample_smooth_noise(rng, body.shape))
    add_patch(layers, nucleus * rng.uniform(0.7, 1.1), x, y, AZURE_LAYER)


def draw_precipitate(layers: np.ndarray, rng: Generator) -> None:
    x, y = sample_position(layers, rng)
    patch = rough_disc(rng, rng.uniform(0.6, 1.8), 0.15, 1) * rng.uniform(0.1, 0.7)
    add_patch(layers, patch, x, y, AZURE_LAYER if rng.random() < 0.5 else DIRT_LAYER)


def draw_droplet(layers: np.ndarray, rng: Generator) -> None:
    """A refractile droplet, or dust on the lens: a dark or bright spot with a ring of the opposite contrast."""
    x, y = sample_position(layers, rng)
    radius = rng.uniform(2, 4.5)
    inner, outer = rough_disc(rng, radius, 0.05, 2), rough_disc(rng, radius + 2, 0.05, 3)
    sign = rng.choice([-0.5, 1.0])
    add_patch(layers, outer * -0.06 * sign, x, y, DIRT_LAYER)
    add_patch(layers, inner * rng.uniform(0.1, 0.35) * sign, x, y, DIRT_LAYER)


def draw_scratch(layers: np.ndarray, rng: Generator) -> None:
    """A hair or scratch that is out of focus."""
    start, direction = np.array(sample_position(layers, rng)), rng.uniform(0, 2 * np.pi)
    line = start + np.arange(0, rng.uniform(120, 420), 20)[:, None] * np.array([np.cos(direction), np.sin(direction)])
    line = line + rng.normal(0, 1.5, line.shape)
    mask = np.zeros(layers.shape[1:], np.float32)
    cv2.polylines(
        mask, [line.astype(np.int32)], False, float(rng.uniform(0.4, 1.2)), int(rng.integers(3, 9)), cv2.LINE_AA
    )
    layers[DIRT_LAYER] += cv2.GaussianBlur(mask, (0, 0), rng.uniform(1.5, 4))


def draw_scale_bar(layers: np.ndarray, rng: Generator) -> None:
    """A scale bar as camera software burns it into the image."""
    x, y = layers.shape[2] - int(rng.integers(150, 200)), layers.shape[1] - int(rng.integers(110, 140))
    line = np.array([(x, y - 6), (x, y), (x + 42, y), (x + 42, y - 6)], np.int32)
    cv2.polylines(layers[DIRT_LAYER], [line], False, 1.5, 1)
