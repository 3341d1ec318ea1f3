"""Training augmentation: every batch a little different. Not to be confused with skew, which is how a site sees.

All of a batch's shapes change by one bilinear look-up, all its colours by one multiply-add, so that it costs a few
per cent of a training step and works on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

KNOTS = 5  # of the elastic field, a side


@dataclass(frozen=True)
class Augment:
    flip: bool = False
    rotate: float = 0.0  # degrees, either way
    zoom: float = 0.0  # 0.1: from 1/1.1 to 1.1 times as large
    elastic: float = 0.0  # pixels: standard deviation of the knots' displacement
    colour: float = 0.0  # 0.1: each channel times 0.9 to 1.1
    light: float = 0.0  # 0.1: all channels times 0.9 to 1.1, and contrast likewise

    @property
    def moves(self) -> bool:
        return bool(self.flip or self.rotate or self.zoom or self.elastic)

    @property
    def tints(self) -> bool:
        return bool(self.colour or self.light)

    @property
    def absent(self) -> bool:
        return not (self.moves or self.tints)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """x (B, C, H, W) in [0, 1]; what is drawn depends on the generator, B, C and the settings alone."""
        if self.moves:
            where = self._grid(len(x), x.shape[2], x.shape[3], generator).to(x.device)
            x = F.grid_sample(x, where, mode="bilinear", padding_mode="reflection", align_corners=False)
        return self._tinted(x, generator) if self.tints else x

    def _grid(self, n: int, height: int, width: int, generator: torch.Generator) -> Tensor:
        """(B, H, W, 2): where in [-1, 1]^2 each pixel of the new image comes from."""
        angle = _spread(generator, n) * math.radians(self.rotate)
        scale = (1 + self.zoom) ** _spread(generator, n)
        mirror = 1 - 2 * torch.randint(2, (n,), generator=generator) if self.flip else torch.ones(n)
        cos, sin = ((f(angle) * scale).view(n, 1, 1) for f in (torch.cos, torch.sin))
        x = _centres(width).view(1, 1, width) * mirror.view(n, 1, 1)
        y = _centres(height).view(1, height, 1)
        grid = torch.stack([cos * x - sin * y, sin * x + cos * y], -1)
        if self.elastic:
            knots = torch.randn(n, 2, KNOTS, KNOTS, generator=generator) * self.elastic
            field = F.interpolate(knots, size=(height, width), mode="bilinear", align_corners=True)
            grid += field.permute(0, 2, 3, 1) * torch.tensor([2 / width, 2 / height])
        return grid

    def _tinted(self, x: Tensor, generator: torch.Generator) -> Tensor:
        n, channels = x.shape[:2]
        gain = (1 + self.colour * _spread(generator, n, channels)) * (1 + self.light * _spread(generator, n, 1))
        contrast = 1 + self.light * _spread(generator, n, 1)
        gain, contrast = gain.to(x.device), contrast.to(x.device)
        middle = (x.mean((2, 3)) * gain).mean(1, keepdim=True)
        slope, offset = gain * contrast, middle * (1 - contrast)
        return torch.addcmul(offset.view(n, 1, 1, 1), x, slope.view(n, channels, 1, 1)).clamp_(0, 1)


def _spread(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform in [-1, 1]."""
    return torch.rand(*shape, generator=generator) * 2 - 1


def _centres(pixels: int) -> Tensor:
    return (torch.arange(pixels) * 2 + 1) / pixels - 1


NOTHING = Augment()
