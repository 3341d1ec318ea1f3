"""A cell has no upright: where its study says so, an answer is the mean over all eight ways to lay the image down.

On real cells this is worth more than any other step after training: see docs/lab.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from deploy.inference.resize import ImageBatch

ModelOutputs = tuple[NDArray[np.float32], ...]  # probabilities (N, C), traits (N, D), measures (N, Q)
PROBABILITY_FLOOR = 1e-30


def iter_orientations(images: ImageBatch, num_tta_views: int) -> Iterator[ImageBatch]:
    """(N, H, W, 3) as models/probe/feature_probe.py turns training images."""
    yield images
    for n in range(1, num_tta_views):
        rotated = np.rot90(images, n % 4, (1, 2))
        yield np.ascontiguousarray(rotated[:, :, ::-1] if n >= 4 else rotated)


def predict_with_tta(run: Callable[[ImageBatch], ModelOutputs], images: ImageBatch, num_tta_views: int) -> ModelOutputs:
    """Means of logits and traits over the views; measures are of the image as it is."""
    first, *others = (run(view) for view in iter_orientations(images, num_tta_views))
    if not others:
        return first
    outputs = (first, *others)
    logits = np.mean([np.log(np.maximum(p.astype(np.float64), PROBABILITY_FLOOR)) for p, _, _ in outputs], 0)
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    features = np.mean([features for _, features, _ in outputs], 0)
    return (
        np.asarray(exponentials / exponentials.sum(1, keepdims=True), np.float32),
        np.asarray(features, np.float32),
        first[2],
    )
