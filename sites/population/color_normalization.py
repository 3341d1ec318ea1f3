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

from pipeline.core.errors import Refused
from pipeline.core.registry import Component
from sites.data.color_tables import CHUNK, FLATTEST, Table, background_table, site_table


class Normalise(Component):
    """Works on uint8 images (N, C, H, W) and gives such again; `train` are the rows of x that may be measured."""

    def apply(self, x: Tensor, train: Tensor) -> Tensor | None:
        """All rows, normalised; None where nothing changes."""
        if x.dim() != 4 or x.dtype != torch.uint8:
            raise Refused(
                f"normalise {self.name!r} needs images of 8 bits, not data of shape {tuple(x.shape[1:])} and type "
                f"{x.dtype}; use normalise 'none'"
            )
        if not len(train):
            raise Refused(f"normalise {self.name!r} measures training images, and this site has none; use 'none'")
        return self.normalised(x, train)

    @abstractmethod
    def normalised(self, x: Tensor, train: Tensor) -> Tensor: ...


class NoNormalise(Normalise):
    name: Literal["none"] = "none"

    def apply(self, x: Tensor, train: Tensor) -> Tensor | None:
        return None

    def normalised(self, x: Tensor, train: Tensor) -> Tensor:
        return x


class Moments(Normalise):
    """Base of those that set every channel's mean and standard deviation, as shares of full scale."""

    mean: float = Field(0.6, gt=0, lt=1)
    std: float = Field(0.13, gt=0, lt=0.5)

    def moved(self, grey: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return (grey - mean) / std.clamp(min=FLATTEST) * self.std + self.mean


class Site(Moments):
    """Mean and standard deviation over the site's training images: keeps what differs between its images."""

    name: Literal["site"] = "site"

    def normalised(self, x: Tensor, train: Tensor) -> Tensor:
        return _looked_up(x, site_table(_channels(x, train), self.mean, self.std))


class Image(Moments):
    """Mean and standard deviation of every image by itself."""

    name: Literal["image"] = "image"

    def normalised(self, x: Tensor, train: Tensor) -> Tensor:
        return torch.cat([self._each(part.float() / 255) for part in x.split(CHUNK)])

    def _each(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, (2, 3), correction=0, keepdim=True)
        return (self.moved(x, mean, std) * 255).round_().clamp_(0, 255).to(torch.uint8)


class Background(Normalise):
    """White balance on the glass: I' = level * (I / I0) ** k, so optical density -log(I / I0) is multiplied by k.

    I0 is the median, over training images, of an image's glass. k, with `density`, takes the 95th percentile of the
    site's optical density to a fixed value in each channel; else it is 1.
    """

    name: Literal["background"] = "background"
    level: float = Field(0.8, gt=0, le=1)
    density: bool = True

    def normalised(self, x: Tensor, train: Tensor) -> Tensor:
        return _looked_up(x, background_table(_channels(x, train), self.level, self.density))


def _channels(x: Tensor, rows: Tensor) -> list[NDArray[np.uint8]]:
    """Of each colour (n, pixels)."""
    chosen = x.numpy()[rows.numpy()]
    return [chosen[:, c].reshape(len(chosen), -1) for c in range(chosen.shape[1])]


def _looked_up(x: Tensor, table: Table) -> Tensor:
    """x through a table (C, 256)."""
    out = torch.empty_like(x)
    for channel, row in enumerate(torch.from_numpy(table)):
        out[:, channel] = row.index_select(0, x[:, channel].flatten().int()).view_as(out[:, channel])
    return out
