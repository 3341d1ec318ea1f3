"""What an acquisition does to images, as an albumentations pipeline.

A site's own numbers are fixed by its acquisition. What differs from image to image (the place in a vignetted field,
noise) is drawn from a seed that its place at the site decides, so neither threads nor other images matter.
`Compose.set_random_seed` would give every transform the *same* stream; one generator shared by all does not.
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

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # importing it would ask PyPI for a newer version, and warn

import albumentations as A
import cv2

if TYPE_CHECKING:
    from sites.population.scanner_profiles import Acquisition

CHUNK = 128  # images a task: a pipeline is made for each, because it holds a generator that threads may not share
GLASS = 0.9  # quantile of an image's pixels that is taken as light through glass alone
THIN = 3  # every third pixel of every third line tells it well enough
FIELD = 5.5  # a field's half diagonal, in crops
# unit optical densities (R, G, B) of azure and eosin in Giemsa's stain, as in ImageJ's colour deconvolution
DYES = np.array([[0.834750233, 0.513556283, 0.196330403], [0.092789, 0.954111, 0.283111]])
NORMAL = np.array([NormalDist().inv_cdf((n + 0.5) / 256) for n in range(256)], np.float32)
LOG = np.log(np.maximum(np.arange(256), 0.5)).astype(np.float32)


def see(x: Tensor, seen: Acquisition, seed: Callable[[int], int]) -> Tensor:
    """uint8 (N, C, H, W) -> the same through `seen`; seed(row) decides what is random in a row."""
    images = np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy())
    out = np.empty_like(images)

    def some(rows: range) -> None:
        view = pipeline(seen)
        for row in rows:
            view.set_random_state(np.random.default_rng(at := seed(row)), random.Random(at))
            out[row] = view(image=images[row])["image"]

    tasks = [range(start, min(start + CHUNK, len(images))) for start in range(0, len(images), CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(some, tasks))
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()


def pipeline(seen: Acquisition) -> A.Compose:
    return A.Compose(list(_steps(seen)))


def _steps(seen: Acquisition) -> Iterator[A.ImageOnlyTransform]:
    """In the order in which light meets them; what changes nothing is left out."""
    if (seen.azure, seen.eosin, seen.turn, seen.lamp) != (1, 1, 0, (1, 1, 1)):
        yield StainAndLamp(stain(seen.azure, seen.eosin, seen.turn), np.log(seen.lamp))
    if seen.vignette:
        yield Vignette(seen.vignette)
    if seen.blur:
        yield A.GaussianBlur(blur_limit=0, sigma_limit=(seen.blur, seen.blur), p=1)
    if seen.resolution < 1:
        how = {"downscale": cv2.INTER_AREA, "upscale": cv2.INTER_LINEAR}
        yield A.Downscale(scale_range=(seen.resolution, seen.resolution), interpolation_pair=how, p=1)
    if seen.noise:
        yield Noise(seen.noise)
    if seen.gamma != 1:
        yield A.RandomGamma(gamma_limit=(100 * seen.gamma, 100 * seen.gamma), p=1)
    if seen.sharpen:
        yield Sharpen(seen.sharpen)
    if seen.jpeg < 100:
        quality = max(5, round(seen.jpeg))
        yield A.ImageCompression(quality_range=(quality, quality), p=1)


def stain(azure: float, eosin: float, turn: float) -> np.ndarray:
    """(3, 3): optical density -> that of other amounts of dye, turned about the grey axis."""
    dyes = np.vstack([DYES, np.cross(*DYES)])
    amounts = dyes.T @ np.diag([azure, eosin, 1.0]) @ np.linalg.inv(dyes.T)
    turning, _ = cv2.Rodrigues(np.full(3, math.radians(turn) / math.sqrt(3)))
    return np.asarray(turning @ amounts)


class Always(A.ImageOnlyTransform):  # type: ignore[misc]  # albumentations is not followed by mypy
    def __init__(self) -> None:
        super().__init__(p=1)


class StainAndLamp(Always):
    """log I' = log I0 - M OD + log lamp, where OD = log I0 - log I and I0 is the image's glass: affine in log I."""

    def __init__(self, mix: np.ndarray, lamp: np.ndarray) -> None:
        super().__init__()
        self.mix, self.lamp = mix, lamp

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        if img.shape[2] == 1:  # grey: no dyes to tell apart, but a lamp is bright or dim
            return np.asarray(cv2.convertScaleAbs(img, alpha=float(np.exp(self.lamp).mean()))).reshape(img.shape)
        some = img[::THIN, ::THIN].reshape(-1, 3)
        glass = LOG[np.partition(some, at := int(GLASS * len(some)), axis=0)[at]]
        affine = np.column_stack([self.mix, glass - self.mix @ glass + self.lamp])
        return np.asarray(cv2.convertScaleAbs(cv2.exp(cv2.transform(cv2.LUT(img, LOG), affine))))


class Vignette(Always):
    """A crop from somewhere in a field that loses the share `lost` of its light, as r squared, towards the corners.

    Away from the middle it is darker as a whole, and has a ramp towards the corner.
    """

    def __init__(self, lost: float) -> None:
        super().__init__()
        self.lost = lost

    def get_params(self) -> dict[str, Any]:
        far, angle = math.sqrt(self.py_random.random()), self.py_random.uniform(0, 2 * math.pi)
        return {"middle": (far * math.cos(angle), far * math.sin(angle))}  # even over the field's disc, radius 1

    def apply(self, img: np.ndarray, middle: tuple[float, float] = (0.0, 0.0), **params: Any) -> np.ndarray:
        y, x = (
            m + np.linspace(-0.5, 0.5, n, dtype=np.float32) / FIELD for m, n in zip(middle, img.shape[:2], strict=True)
        )
        light = (1 - self.lost * y**2)[:, None] - self.lost * x**2
        return np.asarray(cv2.multiply(img, cv2.merge([light] * img.shape[2]), dtype=cv2.CV_8U)).reshape(img.shape)


class Noise(Always):
    """Gaussian, in 256 steps: a random byte looks up its quantile, several times as fast as `A.GaussNoise`."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.noise = NORMAL * std * 255

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        drawn = np.frombuffer(self.random_generator.bytes(img.size), np.uint8).reshape(img.shape)
        return np.asarray(cv2.add(img, cv2.LUT(drawn, self.noise), dtype=cv2.CV_8U)).reshape(img.shape)


class Sharpen(Always):
    """An unsharp mask without albumentations' threshold: cameras sharpen faint edges too, and leave a halo."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        soft = cv2.GaussianBlur(img, (5, 5), 1.2)
        return np.asarray(cv2.addWeighted(img, 1 + self.amount, soft, -self.amount, 0)).reshape(img.shape)
