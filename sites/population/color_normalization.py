"""Colour normalisation inside a site: what the network sees, from this site's own images. Nothing leaves the site.

What a model needs where it is used later: `none` and `image` nothing; `site` the means and standard deviations of
enough images of the new place, so a first batch has to be seen before anything is classified; `background` the new
place's glass and, with `density`, its cells, which a few fields tell.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.registry import Component
from sites.data.color_tables import IMAGES_PER_STEP, MIN_STD, ColorTable, build_background_table, build_site_table


class ColorNormalization(Component):
    """Works on uint8 images (N, C, H, W) and gives such again; `train` are the rows of x that may be measured."""

    def apply(self, x: Tensor, train_indices: Tensor) -> Tensor | None:
        """All rows, normalised; None where nothing changes."""
        if x.dim() != 4 or x.dtype != torch.uint8:
            raise IncompatibleStudyError(
                f"normalise {self.name!r} needs images of 8 bits, not data of shape {tuple(x.shape[1:])} and type "
                f"{x.dtype}; use normalise 'none'"
            )
        if not len(train_indices):
            raise IncompatibleStudyError(
                f"normalise {self.name!r} measures training images, and this site has none; use 'none'"
            )
        return self.normalize_images(x, train_indices)

    @abstractmethod
    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor: ...


class NoColorNormalization(ColorNormalization):
    name: Literal["none"] = "none"

    def apply(self, x: Tensor, train_indices: Tensor) -> Tensor | None:
        return None

    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor:
        return x


class MomentNormalization(ColorNormalization):
    """Base of those that set every channel's mean and standard deviation, as shares of full scale."""

    mean: float = Field(0.6, gt=0, lt=1)
    std: float = Field(0.13, gt=0, lt=0.5)

    def standardize(self, gray: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return (gray - mean) / std.clamp(min=MIN_STD) * self.std + self.mean


class SiteNormalization(MomentNormalization):
    """Mean and standard deviation over the site's training images: keeps what differs between its images."""

    name: Literal["site"] = "site"

    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor:
        return _apply_table(x, build_site_table(_channel_pixels(x, train_indices), self.mean, self.std))


class ImageNormalization(MomentNormalization):
    """Mean and standard deviation of every image by itself."""

    name: Literal["image"] = "image"

    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor:
        return torch.cat([self._normalize_each(part.float() / 255) for part in x.split(IMAGES_PER_STEP)])

    def _normalize_each(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, (2, 3), correction=0, keepdim=True)
        return (self.standardize(x, mean, std) * 255).round_().clamp_(0, 255).to(torch.uint8)


class BackgroundNormalization(ColorNormalization):
    """White balance on the glass: I' = level * (I / I0) ** k, so optical density -log(I / I0) is multiplied by k.

    I0 is the median, over training images, of an image's glass. k, with `density`, takes the 95th percentile of the
    site's optical density to a fixed value in each channel; else it is 1.
    """

    name: Literal["background"] = "background"
    level: float = Field(0.8, gt=0, le=1)
    density: bool = True

    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor:
        return _apply_table(x, build_background_table(_channel_pixels(x, train_indices), self.level, self.density))


def _channel_pixels(x: Tensor, rows: Tensor) -> list[NDArray[np.uint8]]:
    """Of each colour (n, pixels)."""
    selected = x.numpy()[rows.numpy()]
    return [selected[:, c].reshape(len(selected), -1) for c in range(selected.shape[1])]


def _apply_table(x: Tensor, table: ColorTable) -> Tensor:
    """x through a table (C, 256)."""
    out = torch.empty_like(x)
    for channel, row in enumerate(torch.from_numpy(table)):
        out[:, channel] = row.index_select(0, x[:, channel].flatten().int()).view_as(out[:, channel])
    return out
