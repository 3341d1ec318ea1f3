"""A place's colours as a table of 256 grey levels a channel; numpy alone, for a bedside machine measures its own too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import BadData

GREYS = 256
CHUNK = 256  # images a step
FLATTEST = 1 / 255  # a standard deviation below one grey level is noise of rounding: it is not blown up
SMOOTH = 9  # grey levels over which a histogram's peak is looked for
DARK = 0.05  # quantile of light, so 0.95 of optical density, that lies in the cells
DENSITY = (0.35, 0.6, 0.4)  # optical density there, of red, green and blue, in a well stained smear
THINNEST = 0.02  # optical density below which there is no cell to be measured
FEWEST = 20  # images from which a place's colours can be told

Channels = Sequence[NDArray[np.uint8]]  # of each colour (N, pixels)
Table = NDArray[np.uint8]  # (C, 256)


def site_table(channels: Channels, mean: float, std: float) -> Table:
    """Mean and standard deviation over all pixels, as shares of full scale, become the given ones."""
    grey = np.linspace(0, 1, GREYS)
    share = np.stack([_histogram(channel) for channel in channels]).astype(np.float64)
    share /= share.sum(1, keepdims=True)
    middle = share @ grey
    spread = np.sqrt(np.maximum(share @ grey**2 - middle**2, 0))
    return pixels((grey - middle[:, None]) / np.maximum(spread, FLATTEST)[:, None] * std + mean)


def background_table(channels: Channels, level: float, density: bool) -> Table:
    """I' = level * (I / I0) ** k: I0 is the median of the images' glass, k makes cells as dense as in a well stained smear."""
    glass = np.array([np.quantile(_glass(channel), 0.5) for channel in channels])
    light = np.maximum(np.arange(GREYS), 0.5) / glass[:, None]
    power = _powers(channels, glass) if density else np.ones_like(glass)
    return pixels(level * light ** power[:, None])


def pixels(share: NDArray[np.float64]) -> Table:
    return np.rint(share * 255).clip(0, 255).astype(np.uint8)


def table_of(rule: Mapping[str, Any], images: NDArray[np.uint8]) -> Table:
    """Of images (N, H, W, C) of one place, by a study's [normalise]."""
    if len(images) < FEWEST:
        raise BadData(
            f"this model sees colours by those of the place it is at, and {len(images)} cells do not tell them; give at least "
            f"{FEWEST} of one slide, or run `hemofed edge verify` once"
        )
    channels = [images[..., c].reshape(len(images), -1) for c in range(images.shape[-1])]
    if rule["name"] == "site":
        return site_table(channels, rule["mean"], rule["std"])
    if rule["name"] == "background":
        return background_table(channels, rule["level"], rule["density"])
    raise BadData(f"the model's normalisation {rule['name']!r} comes from a plugin, which bedside machines do not have")


def look_up(images: NDArray[np.uint8], table: Table) -> NDArray[np.uint8]:
    """(N, H, W, C) through a table."""
    return np.stack([table[c][images[..., c]] for c in range(images.shape[-1])], -1)


def _histogram(channel: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(256,); whole numbers, so the order of summing does not matter."""
    parts = (channel[at : at + CHUNK].ravel() for at in range(0, len(channel), CHUNK))
    return np.asarray(np.sum([np.bincount(part, minlength=GREYS) for part in parts], 0, dtype=np.int64))


def _glass(channel: NDArray[np.uint8]) -> NDArray[np.float64]:
    """(N,): the commonest grey level among the brighter half of each image's pixels, at least 1."""
    found = [_peaks(channel[at : at + CHUNK]) for at in range(0, len(channel), CHUNK)]
    return np.concatenate(found)


def _peaks(rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    n, width = rows.shape
    counts = np.bincount((rows + np.arange(n)[:, None] * GREYS).ravel(), minlength=n * GREYS).reshape(n, GREYS)
    half = SMOOTH // 2
    sums = np.cumsum(np.pad(counts, ((0, 0), (half + 1, half))), 1)
    near = np.minimum(np.arange(GREYS) + half, GREYS - 1) - np.maximum(np.arange(GREYS) - half, 0) + 1
    smooth = (sums[:, SMOOTH:] - sums[:, :-SMOOTH]) / near
    median = np.partition(rows, (width - 1) // 2, 1)[:, (width - 1) // 2]
    bright = np.arange(GREYS) >= median[:, None]
    return np.asarray(np.maximum((smooth * bright).argmax(1), 1), np.float64)


def _powers(channels: Channels, glass: NDArray[np.float64]) -> NDArray[np.float64]:
    below = np.cumsum([_histogram(channel) for channel in channels], 1)
    dark = np.maximum((below < DARK * below[:, -1:]).sum(1), 1)
    wanted = np.array(DENSITY if len(glass) == len(DENSITY) else [math.fsum(DENSITY) / len(DENSITY)])
    return np.asarray(wanted / np.maximum(np.log(glass / dark), THINNEST))
