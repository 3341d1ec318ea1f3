"""A cell has no upright: where its study says so, an answer is the mean over all eight ways to lay the image down.

On real cells this is worth more than any other step after training: see docs/lab.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from deploy.inference.resize import Images

Seen = tuple[NDArray[np.float32], ...]  # probabilities (N, C), traits (N, D), measures (N, Q)
TINY = 1e-30


def views(images: Images, turns: int) -> Iterator[Images]:
    """(N, H, W, 3) as models/probe/feature_probe.py turns training images."""
    yield images
    for n in range(1, turns):
        turned = np.rot90(images, n % 4, (1, 2))
        yield np.ascontiguousarray(turned[:, :, ::-1] if n >= 4 else turned)


def seen_from_all_sides(run: Callable[[Images], Seen], images: Images, turns: int) -> Seen:
    """Means of logits and traits over the views; measures are of the image as it is."""
    first, *others = (run(view) for view in views(images, turns))
    if not others:
        return first
    every = (first, *others)
    logits = np.mean([np.log(np.maximum(p.astype(np.float64), TINY)) for p, _, _ in every], 0)
    share = np.exp(logits - logits.max(1, keepdims=True))
    traits = np.mean([traits for _, traits, _ in every], 0)
    return np.asarray(share / share.sum(1, keepdims=True), np.float32), np.asarray(traits, np.float32), first[2]
