"""Stochastic rounding: floor(x + u) with u uniform on [0, 1), from a generator fast enough for every number of a model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CHUNK_SIZE = 1 << 18  # numbers processed at a time, so that they stay in the cache
DITHER_UNIT = 2.0**-16  # u = 1/2 + DITHER_UNIT * draw


class UniformDither:
    """Uniform integers from -2^15 to 2^15 - 1, as float32.

    Each number takes 16 bits. The largest u is 1 - 2^-16, so the probability of rounding up is too low by less than 2^-16,
    by 2^-17 on average: a bias of a hundred-thousandth of a step. NumPy's SFC64, seeded from the torch generator, takes a
    third of the time of torch's generator.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._bit_generator = np.random.SFC64(int(torch.randint(2**63 - 1, (), generator=generator)))

    def __call__(self, n: int) -> Tensor:
        words = self._bit_generator.random_raw((n + 3) // 4)
        return torch.from_numpy(words.view(np.int16)[:n]).float()
