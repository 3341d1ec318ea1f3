"""Colour normalisation inside a site: what the network sees, from this site's own images. Nothing leaves the site.

What a model needs where it is used later: `none` and `image` nothing; `site` the means and standard deviations of
enough images of the new place, so a first batch has to be seen before anything is classified; `background` the new
place's glass and, with `density`, its cells, which a few fields tell.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.components import Component
from pipeline.errors import Refused

GREYS = 256
CHUNK = 256  # images a step
FLATTEST = 1 / 255  # a standard deviation below one grey level is noise of rounding: it is not blown up
SMOOTH = 9  # grey levels over which a histogram's peak is looked for
DARK = 0.05  # quantile of light, so 0.95 of optical density, that lies in the cells
DENSITY = (0.35, 0.6, 0.4)  # optical density there, of red, green and blue, in a well stained smear
THINNEST = 0.02  # optical density below which there is no cell to be measured


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
        grey = torch.linspace(0, 1, GREYS, dtype=torch.float64)
        share = _histogram(x, train).double()
        share /= share.sum(1, keepdim=True)  # (C, 256)
        mean = share @ grey
        std = (share @ grey**2 - mean**2).clamp(min=0).sqrt()
        return _looked_up(x, self.moved(grey, mean[:, None], std[:, None]))


class Image(Moments):
    """Mean and standard deviation of every image by itself."""

    name: Literal["image"] = "image"

    def normalised(self, x: Tensor, train: Tensor) -> Tensor:
        return torch.cat([self._each(part.float() / 255) for part in x.split(CHUNK)])

    def _each(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, (2, 3), correction=0, keepdim=True)
        return _pixels(self.moved(x, mean, std))


class Background(Normalise):
    """White balance on the glass: I' = level * (I / I0) ** k, so optical density -log(I / I0) is multiplied by k.

    I0 is the median, over training images, of an image's glass. k, with `density`, takes the 95th percentile of the
    site's optical density to a fixed value in each channel; else it is 1.
    """

    name: Literal["background"] = "background"
    level: float = Field(0.8, gt=0, le=1)
    density: bool = True

    def normalised(self, x: Tensor, train: Tensor) -> Tensor:
        glass = torch.cat([_glass(x[rows]) for rows in train.split(CHUNK)]).quantile(0.5, 0)  # (C,)
        light = torch.arange(GREYS, dtype=torch.float64).clamp(min=0.5) / glass[:, None]  # (C, 256)
        power = self._powers(x, train, glass) if self.density else torch.ones_like(glass)
        return _looked_up(x, self.level * light ** power[:, None])

    def _powers(self, x: Tensor, train: Tensor, glass: Tensor) -> Tensor:
        below = _histogram(x, train).cumsum(1)
        dark = (below < DARK * below[:, -1:]).sum(1).clamp(min=1)
        wanted = torch.tensor(DENSITY if len(glass) == len(DENSITY) else [math.fsum(DENSITY) / len(DENSITY)])
        return wanted / (glass / dark).log().clamp(min=THINNEST)


def _glass(x: Tensor) -> Tensor:
    """(n, C): the commonest grey level among the brighter half of each image's pixels, at least 1."""
    rows = x.flatten(0, 1).flatten(1).long()  # (n * C, H * W)
    counts = torch.zeros(len(rows), GREYS).scatter_add_(1, rows, torch.ones(rows.shape))
    smooth = torch.nn.functional.avg_pool1d(counts[:, None], SMOOTH, 1, SMOOTH // 2, count_include_pad=False)[:, 0]
    bright = torch.arange(GREYS) >= rows.median(1, keepdim=True).values
    return (smooth * bright).argmax(1).clamp(min=1).double().view(x.shape[:2])


def _histogram(x: Tensor, rows: Tensor) -> Tensor:
    """(C, 256) counts over the rows; whole numbers, so the order of summing does not matter."""
    counts = torch.zeros(x.shape[1], GREYS, dtype=torch.int64)
    for part in rows.split(CHUNK):
        for channel, pixels in enumerate(x[part].unbind(1)):
            counts[channel] += torch.bincount(pixels.flatten(), minlength=GREYS)
    return counts


def _looked_up(x: Tensor, table: Tensor) -> Tensor:
    """x through a table (C, 256) of shares of full scale."""
    out = torch.empty_like(x)
    for channel, row in enumerate(_pixels(table)):
        out[:, channel] = row.index_select(0, x[:, channel].flatten().int()).view_as(out[:, channel])
    return out


def _pixels(share: Tensor) -> Tensor:
    return (share * 255).round_().clamp_(0, 255).to(torch.uint8)
