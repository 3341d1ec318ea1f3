"""Images made smaller (or larger) as the training side makes them, in two matrix products: no image library is needed.

`area`: every new pixel is the mean of what it covers, as OpenCV's INTER_AREA; `triangle`: Pillow's BILINEAR. Larger
images are interpolated linearly in both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rule = Literal["area", "triangle"]
Images = NDArray[np.uint8]


def resized(images: Images, size: tuple[int, int], rule: Rule) -> Images:
    """(N, H, W, 3) -> (N, *size, 3)"""
    _n, height, width, _channels = images.shape
    if (height, width) == size:
        return images
    rows, columns = weights(height, size[0], rule), weights(width, size[1], rule)
    tall = np.tensordot(images.astype(np.float32), columns, (2, 1))  # (N, H, 3, w)
    small = np.tensordot(tall, rows, (1, 1))  # (N, 3, w, h)
    return np.ascontiguousarray(np.rint(small.transpose(0, 3, 2, 1)).clip(0, 255).astype(np.uint8))


@lru_cache(32)
def weights(old: int, new: int, rule: Rule) -> NDArray[np.float32]:
    """(new, old), rows add up to 1."""
    scale = old / new
    if scale < 1 or rule == "triangle":
        middle = (np.arange(new) + 0.5) * scale - 0.5
        reach = max(scale, 1.0)
        found = np.maximum(0.0, 1 - np.abs(np.arange(old) - middle[:, None]) / reach)
    else:
        left, right = np.arange(new)[:, None] * scale, (np.arange(new)[:, None] + 1) * scale
        found = np.clip(np.minimum(np.arange(old) + 1, right) - np.maximum(np.arange(old), left), 0, None)
    return np.asarray(found / found.sum(1, keepdims=True), np.float32)
