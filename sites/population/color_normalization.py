"""Colour normalisation of a site's images, from statistics of this site's own images. Nothing leaves the site.

What a model needs later at a new site: `none` and `image` need nothing; `site` needs means and standard deviations, so
a first batch of images before the first prediction; `background` needs the colour of the glass and, with `density`, the
optical density of the cells, for which a few fields suffice.
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
    """Maps uint8 images (N, C, H, W) to uint8 images of the same shape."""

    def apply(self, x: Tensor, train_indices: Tensor) -> Tensor | None:
        """Normalises all rows of x with statistics of the rows `train_indices` alone; None: x stays as it is."""
        if x.dim() != 4 or x.dtype != torch.uint8:
            raise IncompatibleStudyError(
                f"normalization {self.name!r} needs 8-bit images, not data of shape {tuple(x.shape[1:])} and type "
                f"{x.dtype}; use normalization 'none'"
            )
        if not len(train_indices):
            raise IncompatibleStudyError(
                f"normalization {self.name!r} measures training images, and this site has none; "
                "use normalization 'none'"
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
    """Base of the normalisations to a given mean and standard deviation of each channel, as fractions of full scale."""

    mean: float = Field(0.6, gt=0, lt=1)
    std: float = Field(0.13, gt=0, lt=0.5)

    def standardize(self, gray: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return (gray - mean) / std.clamp(min=MIN_STD) * self.std + self.mean


class SiteNormalization(MomentNormalization):
    """Mean and standard deviation over all training images of the site; keeps the differences between its images."""

    name: Literal["site"] = "site"

    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor:
        return _apply_table(x, build_site_table(_channel_pixels(x, train_indices), self.mean, self.std))


class ImageNormalization(MomentNormalization):
    """Mean and standard deviation of each image."""

    name: Literal["image"] = "image"

    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor:
        return torch.cat([self._normalize_each(part.float() / 255) for part in x.split(IMAGES_PER_STEP)])

    def _normalize_each(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, (2, 3), correction=0, keepdim=True)
        return (self.standardize(x, mean, std) * 255).round_().clamp_(0, 255).to(torch.uint8)


class BackgroundNormalization(ColorNormalization):
    """White balance on the glass: I' = level * (I / I0) ** k, which multiplies the optical density -log(I / I0) by k.

    I0 is the median of the images' glass over the training images. With `density`, k maps the 95th percentile of the
    site's optical density to a fixed value in each channel; otherwise k = 1.
    """

    name: Literal["background"] = "background"
    level: float = Field(0.8, gt=0, le=1)
    density: bool = True

    def normalize_images(self, x: Tensor, train_indices: Tensor) -> Tensor:
        return _apply_table(x, build_background_table(_channel_pixels(x, train_indices), self.level, self.density))


def _channel_pixels(x: Tensor, indices: Tensor) -> list[NDArray[np.uint8]]:
    """The pixels of these images, (n, H * W) for each channel."""
    selected = x.numpy()[indices.numpy()]
    return [selected[:, c].reshape(len(selected), -1) for c in range(selected.shape[1])]


def _apply_table(x: Tensor, table: ColorTable) -> Tensor:
    """Looks up every pixel of x (N, C, H, W) in the table (C, 256)."""
    out = torch.empty_like(x)
    for channel, levels in enumerate(torch.from_numpy(table)):
        out[:, channel] = levels.index_select(0, x[:, channel].flatten().int()).view_as(out[:, channel])
    return out
