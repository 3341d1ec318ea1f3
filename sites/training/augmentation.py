"""Training augmentation: random changes of each image in a batch. Feature skew, in contrast, is fixed for a site.

One bilinear look-up changes the geometry of a batch and one multiply-add its colours, so augmentation costs a few per
cent of a training step and runs on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ELASTIC_KNOTS = 5  # knots of the elastic displacement field along each side


@dataclass(frozen=True)
class BatchAugmentation:
    """Each image of a batch gets its own random change."""

    flip: bool = False  # mirror left and right, with probability 1/2
    rotate: float = 0.0  # maximum angle in degrees, in both directions
    zoom: float = 0.0  # 0.1: scale factors from 1/1.1 to 1.1
    elastic: float = 0.0  # standard deviation of the knots' displacement, in pixels
    color: float = 0.0  # 0.1: factors from 0.9 to 1.1 for each channel
    light: float = 0.0  # 0.1: a factor from 0.9 to 1.1 for all channels, and one for the contrast

    @property
    def changes_geometry(self) -> bool:
        return bool(self.flip or self.rotate or self.zoom or self.elastic)

    @property
    def changes_color(self) -> bool:
        return bool(self.color or self.light)

    @property
    def is_identity(self) -> bool:
        return not (self.changes_geometry or self.changes_color)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Augments x (B, C, H, W) in [0, 1]. Random numbers depend on the generator, B, C and the settings alone."""
        if self.changes_geometry:
            grid = self._sampling_grid(len(x), x.shape[2], x.shape[3], generator).to(x.device)
            x = F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
        return self._apply_color(x, generator) if self.changes_color else x

    def _sampling_grid(self, n: int, height: int, width: int, generator: torch.Generator) -> Tensor:
        """(B, H, W, 2): for each output pixel its source (x, y) in [-1, 1]^2, as `F.grid_sample` expects."""
        angle = _uniform_symmetric(generator, n) * math.radians(self.rotate)
        scale = (1 + self.zoom) ** _uniform_symmetric(generator, n)
        mirror = 1 - 2 * torch.randint(2, (n,), generator=generator) if self.flip else torch.ones(n)
        cos, sin = ((f(angle) * scale).view(n, 1, 1) for f in (torch.cos, torch.sin))
        x = _pixel_centers(width).view(1, 1, width) * mirror.view(n, 1, 1)
        y = _pixel_centers(height).view(1, height, 1)
        grid = torch.stack([cos * x - sin * y, sin * x + cos * y], -1)
        if self.elastic:
            knots = torch.randn(n, 2, ELASTIC_KNOTS, ELASTIC_KNOTS, generator=generator) * self.elastic
            field = F.interpolate(knots, size=(height, width), mode="bilinear", align_corners=True)
            grid += field.permute(0, 2, 3, 1) * torch.tensor([2 / width, 2 / height])
        return grid

    def _apply_color(self, x: Tensor, generator: torch.Generator) -> Tensor:
        n, channels = x.shape[:2]
        gain = (1 + self.color * _uniform_symmetric(generator, n, channels)) * (
            1 + self.light * _uniform_symmetric(generator, n, 1)
        )
        contrast = 1 + self.light * _uniform_symmetric(generator, n, 1)
        gain, contrast = gain.to(x.device), contrast.to(x.device)
        mean = (x.mean((2, 3)) * gain).mean(1, keepdim=True)
        slope, offset = gain * contrast, mean * (1 - contrast)
        return torch.addcmul(offset.view(n, 1, 1, 1), x, slope.view(n, channels, 1, 1)).clamp_(0, 1)


def _uniform_symmetric(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform in [-1, 1]."""
    return torch.rand(*shape, generator=generator) * 2 - 1


def _pixel_centers(pixels: int) -> Tensor:
    return (torch.arange(pixels) * 2 + 1) / pixels - 1


NO_AUGMENTATION = BatchAugmentation()
