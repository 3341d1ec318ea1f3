"""Corruptions of good images, on which the export measures the detection rates of the out-of-distribution guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from deploy.inference.resize import ImageBatch, resize_images


def _apply_as_float(
    transform: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> Callable[[ImageBatch], ImageBatch]:
    return lambda images: np.rint(transform(images.astype(np.float64))).clip(0, 255).astype(np.uint8)


def _defocus(images: ImageBatch) -> ImageBatch:
    """Blurs to an eighth of the resolution."""
    height, width = images.shape[1:3]
    return resize_images(
        resize_images(images, (max(2, height // 8), max(2, width // 8)), "area"), (height, width), "area"
    )


def _empty_glass(images: ImageBatch) -> ImageBatch:
    """The color of the image's corner with camera noise, without a cell."""
    noise = np.random.default_rng(1).normal(0, 2, images.shape)
    return np.asarray((images[:, :1, :1] + noise).clip(0, 255), np.uint8)


def _uniform_noise(images: ImageBatch) -> ImageBatch:
    return np.random.default_rng(2).integers(0, 256, images.shape, dtype=np.uint8)


def _draw_stripes(images: ImageBatch) -> ImageBatch:
    wave = 128 + 100 * np.sin(np.arange(images.shape[2]) / 2)
    return np.broadcast_to(wave[None, None, :, None].astype(np.uint8), images.shape).copy()


CORRUPTIONS: Mapping[str, Callable[[ImageBatch], ImageBatch]] = {
    "rendered cell, unchanged": lambda images: images,
    "far out of focus": _defocus,
    "nearly dark": _apply_as_float(lambda x: x * 0.15),
    "over-exposed": _apply_as_float(lambda x: x * 2.5),
    "camera noise": _apply_as_float(lambda x: x + np.random.default_rng(3).normal(0, 40, x.shape)),
    "colors swapped": lambda images: np.ascontiguousarray(images[..., ::-1] // 2 + images[..., [1, 2, 0]] // 2),
    "negative": lambda images: 255 - images,
    "empty glass": _empty_glass,
    "noise alone": _uniform_noise,
    "stripes": _draw_stripes,
}
