"""Test-time augmentation: mean of the logits over the eight rotations and reflections of an image.

Used where the study's augmentation flips and rotates by at least 90 degrees. docs/export.md has its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from deploy.inference.onnx_session import ModelOutputs
from deploy.inference.resize import ImageBatch

PROBABILITY_FLOOR = 1e-30


def iter_orientations(images: ImageBatch, num_tta_views: int) -> Iterator[ImageBatch]:
    """(N, H, W, 3) in the same orientations as models/probe/feature_probe.py."""
    yield images
    for n in range(1, num_tta_views):
        rotated = np.rot90(images, n % 4, (1, 2))
        yield np.ascontiguousarray(rotated[:, :, ::-1] if n >= 4 else rotated)


def predict_with_tta(run: Callable[[ImageBatch], ModelOutputs], images: ImageBatch, num_tta_views: int) -> ModelOutputs:
    """Means of logits and features over the views; quality measures of the original image only."""
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
