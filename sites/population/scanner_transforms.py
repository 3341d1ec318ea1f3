"""Applies a scanner profile to images, as an albumentations pipeline.

The profile fixes a site's settings. What varies between images (the position in a vignetted field, noise) is sampled
with a seed that depends on the image's row only, so that the result depends neither on threads nor on other images.
`Compose.set_random_seed` would give every transform the *same* stream, so all transforms share one generator.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # otherwise the import asks PyPI for a newer version, and warns

import albumentations as A
import cv2

if TYPE_CHECKING:
    from sites.population.scanner_profiles import ScannerProfile

IMAGES_PER_TASK = 128  # every task builds its own pipeline, which holds a generator that threads must not share
GLASS_QUANTILE = 0.9  # quantile of an image's pixels that is taken as light through glass alone
PIXEL_STRIDE = 3  # the quantile is estimated from every third pixel of every third line
FIELD_HALF_DIAGONAL_CROPS = 5.5  # half diagonal of a field, in crops
# unit optical densities (R, G, B) of azure and eosin in Giemsa stain, as in ImageJ's colour deconvolution
STAIN_VECTORS = np.array([[0.834750233, 0.513556283, 0.196330403], [0.092789, 0.954111, 0.283111]])
NORMAL_QUANTILES = np.array([NormalDist().inv_cdf((n + 0.5) / 256) for n in range(256)], np.float32)
LOG_LEVELS = np.log(np.maximum(np.arange(256), 0.5)).astype(np.float32)


def apply_scanner_profile(x: Tensor, profile: ScannerProfile, seed_for_row: Callable[[int], int]) -> Tensor:
    """uint8 (N, C, H, W) -> uint8 (N, C, H, W); `seed_for_row` seeds what is random in the image of that row."""
    images = np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy())
    out = np.empty_like(images)

    def transform_rows(rows: range) -> None:
        transform = build_pipeline(profile)
        for row in rows:
            transform.set_random_state(np.random.default_rng(row_seed := seed_for_row(row)), random.Random(row_seed))
            out[row] = transform(image=images[row])["image"]

    tasks = [
        range(start, min(start + IMAGES_PER_TASK, len(images))) for start in range(0, len(images), IMAGES_PER_TASK)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(transform_rows, tasks))
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()


def build_pipeline(profile: ScannerProfile) -> A.Compose:
    return A.Compose(list(_pipeline_steps(profile)))


def _pipeline_steps(profile: ScannerProfile) -> Iterator[A.ImageOnlyTransform]:
    """In the order in which they act on the light; steps without effect are omitted."""
    if (profile.azure, profile.eosin, profile.hue_shift, profile.lamp) != (1, 1, 0, (1, 1, 1)):
        yield StainLampTransform(stain_matrix(profile.azure, profile.eosin, profile.hue_shift), np.log(profile.lamp))
    if profile.vignette:
        yield VignetteTransform(profile.vignette)
    if profile.blur:
        yield A.GaussianBlur(blur_limit=0, sigma_limit=(profile.blur, profile.blur), p=1)
    if profile.resolution < 1:
        interpolation = {"downscale": cv2.INTER_AREA, "upscale": cv2.INTER_LINEAR}
        yield A.Downscale(scale_range=(profile.resolution, profile.resolution), interpolation_pair=interpolation, p=1)
    if profile.noise:
        yield NoiseTransform(profile.noise)
    if profile.gamma != 1:
        yield A.RandomGamma(gamma_limit=(100 * profile.gamma, 100 * profile.gamma), p=1)
    if profile.sharpen:
        yield UnsharpMaskTransform(profile.sharpen)
    if profile.jpeg < 100:
        quality = max(5, round(profile.jpeg))
        yield A.ImageCompression(quality_range=(quality, quality), p=1)


def stain_matrix(azure: float, eosin: float, hue_shift: float) -> np.ndarray:
    """(3, 3): maps optical densities (R, G, B) to those with scaled amounts of dye, rotated about the grey axis.

    `azure`, `eosin`: factors of the dyes; `hue_shift`: degrees.
    """
    dyes = np.vstack([STAIN_VECTORS, np.cross(*STAIN_VECTORS)])
    stain_scaling = dyes.T @ np.diag([azure, eosin, 1.0]) @ np.linalg.inv(dyes.T)
    rotation, _ = cv2.Rodrigues(np.full(3, math.radians(hue_shift) / math.sqrt(3)))
    return np.asarray(rotation @ stain_scaling)


class AlwaysAppliedTransform(A.ImageOnlyTransform):  # type: ignore[misc]  # albumentations is not followed by mypy
    def __init__(self) -> None:
        super().__init__(p=1)


class StainLampTransform(AlwaysAppliedTransform):
    """log I' = log I0 - M OD + log lamp, affine in log I. OD = log I0 - log I, I0 is the image's glass, M is (3, 3)."""

    def __init__(self, density_matrix: np.ndarray, log_lamp: np.ndarray) -> None:
        super().__init__()
        self.density_matrix, self.log_lamp = density_matrix, log_lamp

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        if img.shape[2] == 1:  # in a grey image dyes cannot be separated; the lamp only scales the brightness
            return np.asarray(cv2.convertScaleAbs(img, alpha=float(np.exp(self.log_lamp).mean()))).reshape(img.shape)
        sampled_pixels = img[::PIXEL_STRIDE, ::PIXEL_STRIDE].reshape(-1, 3)
        rank = int(GLASS_QUANTILE * len(sampled_pixels))
        log_glass = LOG_LEVELS[np.partition(sampled_pixels, rank, axis=0)[rank]]
        affine = np.column_stack([self.density_matrix, log_glass - self.density_matrix @ log_glass + self.log_lamp])
        return np.asarray(cv2.convertScaleAbs(cv2.exp(cv2.transform(cv2.LUT(img, LOG_LEVELS), affine))))


class VignetteTransform(AlwaysAppliedTransform):
    """A crop at a random position of a field that loses the fraction `light_loss * r**2` of its light at radius r.

    The radius is 1 in the field's corners. A crop away from the center is darker and has a gradient.
    """

    def __init__(self, light_loss: float) -> None:
        super().__init__()
        self.light_loss = light_loss

    def get_params(self) -> dict[str, Any]:
        radius, angle = math.sqrt(self.py_random.random()), self.py_random.uniform(0, 2 * math.pi)
        return {"crop_center": (radius * math.cos(angle), radius * math.sin(angle))}  # uniform in the unit disc

    def apply(self, img: np.ndarray, crop_center: tuple[float, float] = (0.0, 0.0), **params: Any) -> np.ndarray:
        y, x = (
            center + np.linspace(-0.5, 0.5, n, dtype=np.float32) / FIELD_HALF_DIAGONAL_CROPS
            for center, n in zip(crop_center, img.shape[:2], strict=True)
        )
        light = (1 - self.light_loss * y**2)[:, None] - self.light_loss * x**2
        return np.asarray(cv2.multiply(img, cv2.merge([light] * img.shape[2]), dtype=cv2.CV_8U)).reshape(img.shape)


class NoiseTransform(AlwaysAppliedTransform):
    """Gaussian noise of 256 levels: random bytes index normal quantiles, several times faster than `A.GaussNoise`."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.noise_levels = NORMAL_QUANTILES * std * 255

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        random_bytes = np.frombuffer(self.random_generator.bytes(img.size), np.uint8).reshape(img.shape)
        return np.asarray(cv2.add(img, cv2.LUT(random_bytes, self.noise_levels), dtype=cv2.CV_8U)).reshape(img.shape)


class UnsharpMaskTransform(AlwaysAppliedTransform):
    """An unsharp mask without albumentations' threshold: cameras sharpen faint edges too, which leaves a halo."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        blurred = cv2.GaussianBlur(img, (5, 5), 1.2)
        return np.asarray(cv2.addWeighted(img, 1 + self.amount, blurred, -self.amount, 0)).reshape(img.shape)
