"""What else lies about on a slide: platelets, white cells, stain precipitate, dust out of focus, scratches."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.random import Generator

from sites.data.renderer.polygons import blob
from sites.data.renderer.rasterize import AZURE, GREY, depth_of, smooth, stamp, waves


def clutter(layers: np.ndarray, rng: Generator) -> None:
    for _ in range(rng.poisson(2.5)):
        platelet(layers, rng)
    if rng.random() < 0.12:
        white_cell(layers, rng)
    if rng.random() < 0.35:
        for _ in range(rng.poisson(8)):
            speck(layers, rng)
    for _ in range(rng.poisson(1.2)):
        bubble(layers, rng)
    if rng.random() < 0.02:
        scratch(layers, rng)
    if rng.random() < 0.1:
        scale_bar(layers, rng)


def anywhere(layers: np.ndarray, rng: Generator) -> tuple[int, int]:
    return int(rng.integers(layers.shape[2])), int(rng.integers(layers.shape[1]))


def disc(rng: Generator, radius: float, rough: float, edge: float) -> np.ndarray:
    return smooth(0, edge, depth_of(blob(rng, rough) * radius))


def platelet(layers: np.ndarray, rng: Generator) -> None:
    x, y = anywhere(layers, rng)
    for _ in range(1 if rng.random() < 0.8 else int(rng.integers(2, 6))):  # sometimes in a clump
        patch = disc(rng, rng.uniform(3, 6.5), 0.12, 3)
        patch *= (1 + 0.35 * waves(rng, patch.shape)) * rng.uniform(0.25, 0.75)
        stamp(layers, patch, x, y, AZURE)
        x, y = x + int(rng.normal(0, 12)), y + int(rng.normal(0, 12))


def white_cell(layers: np.ndarray, rng: Generator) -> None:
    x, y = anywhere(layers, rng)
    radius = rng.uniform(27, 38)
    body = disc(rng, radius, 0.03, 4)
    stamp(layers, body * (1 + 0.3 * waves(rng, body.shape)) * rng.uniform(0.1, 0.3), x, y, AZURE)
    angle = rng.uniform(0, 2 * np.pi)
    lobes = int(rng.integers(1, 5))
    nucleus = np.zeros_like(body)[None]
    for _ in range(lobes):
        lobe = disc(rng, radius * (0.72 if lobes == 1 else 0.36), 0.1, 3)
        away = radius * (0.1 if lobes == 1 else 0.45)
        angle += rng.uniform(0.8, 1.5)
        middle = body.shape[1] // 2 + int(away * np.cos(angle)), body.shape[0] // 2 + int(away * np.sin(angle))
        stamp(nucleus, lobe, *middle, 0)
    nucleus = np.minimum(nucleus[0], 1) * (1 + 0.12 * waves(rng, body.shape))
    stamp(layers, nucleus * rng.uniform(0.7, 1.1), x, y, AZURE)


def speck(layers: np.ndarray, rng: Generator) -> None:
    x, y = anywhere(layers, rng)
    patch = disc(rng, rng.uniform(0.6, 1.8), 0.15, 1) * rng.uniform(0.1, 0.7)
    stamp(layers, patch, x, y, AZURE if rng.random() < 0.5 else GREY)


def bubble(layers: np.ndarray, rng: Generator) -> None:
    """A refractile droplet or dust on the lens: a dark or bright spot with a ring of the other kind."""
    x, y = anywhere(layers, rng)
    radius = rng.uniform(2, 4.5)
    inner, outer = disc(rng, radius, 0.05, 2), disc(rng, radius + 2, 0.05, 3)
    sign = rng.choice([-0.5, 1.0])
    stamp(layers, outer * -0.06 * sign, x, y, GREY)
    stamp(layers, inner * rng.uniform(0.1, 0.35) * sign, x, y, GREY)


def scratch(layers: np.ndarray, rng: Generator) -> None:
    """A hair or scratch out of focus."""
    start, way = np.array(anywhere(layers, rng)), rng.uniform(0, 2 * np.pi)
    line = start + np.arange(0, rng.uniform(120, 420), 20)[:, None] * np.array([np.cos(way), np.sin(way)])
    line = line + rng.normal(0, 1.5, line.shape)
    mask = np.zeros(layers.shape[1:], np.float32)
    cv2.polylines(
        mask, [line.astype(np.int32)], False, float(rng.uniform(0.4, 1.2)), int(rng.integers(3, 9)), cv2.LINE_AA
    )
    layers[GREY] += cv2.GaussianBlur(mask, (0, 0), rng.uniform(1.5, 4))


def scale_bar(layers: np.ndarray, rng: Generator) -> None:
    """Burned into the picture by the camera's software."""
    x, y = layers.shape[2] - int(rng.integers(150, 200)), layers.shape[1] - int(rng.integers(110, 140))
    line = np.array([(x, y - 6), (x, y), (x + 42, y), (x + 42, y - 6)], np.int32)
    cv2.polylines(layers[GREY], [line], False, 1.5, 1)
