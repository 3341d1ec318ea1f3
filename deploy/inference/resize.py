"""Resizes images as the training side does, by two matrix products without an image library.

`area`: each new pixel is the mean of the area it covers, like OpenCV's INTER_AREA; `triangle`: like Pillow's BILINEAR.
Both enlarge by linear interpolation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ResizeRule = Literal["area", "triangle"]
ImageBatch = NDArray[np.uint8]  # (N, H, W, 3), RGB


def resize_images(images: ImageBatch, size: tuple[int, int], rule: ResizeRule) -> ImageBatch:
    """(N, H, W, 3) -> (N, *size, 3)"""
    _n, height, width, _channels = images.shape
    if (height, width) == size:
        return images
    rows, columns = interpolation_weights(height, size[0], rule), interpolation_weights(width, size[1], rule)
    wide_resized = np.tensordot(images.astype(np.float32), columns, (2, 1))  # (N, H, 3, w)
    resized = np.tensordot(wide_resized, rows, (1, 1))  # (N, 3, w, h)
    return np.ascontiguousarray(np.rint(resized.transpose(0, 3, 2, 1)).clip(0, 255).astype(np.uint8))


@lru_cache(32)
def interpolation_weights(old_size: int, new_size: int, rule: ResizeRule) -> NDArray[np.float32]:
    """(new, old); each row sums to 1."""
    scale = old_size / new_size
    if scale < 1 or rule == "triangle":
        centers = (np.arange(new_size) + 0.5) * scale - 0.5
        support = max(scale, 1.0)
        overlap = np.maximum(0.0, 1 - np.abs(np.arange(old_size) - centers[:, None]) / support)
    else:
        left, right = np.arange(new_size)[:, None] * scale, (np.arange(new_size)[:, None] + 1) * scale
        overlap = np.clip(np.minimum(np.arange(old_size) + 1, right) - np.maximum(np.arange(old_size), left), 0, None)
    return np.asarray(overlap / overlap.sum(1, keepdims=True), np.float32)
