"""Where secret randomness comes from: the operating system, stretched by AES-256 in counter mode.

Poisson draws, noise and masks may not be derivable from the study: whoever knew them could take the noise away. Torch's
own generator would not do: on a CPU its seed has 32 bits, which can be tried one by one, and its stream is predictable.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_PAIRS = 1 << 15  # numbers at a time: their float64 intermediates stay in the cache


class Entropy:
    """One key for the life of the object; only a test may give it."""

    def __init__(self, key: bytes | None = None) -> None:
        self._stream = Cipher(algorithms.AES256(key or os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def uniform(self, n: int) -> np.ndarray:
        """(n,) float64 in (0, 1], of 53 bits each."""
        words = np.frombuffer(self._stream.update(bytes(8 * n)), np.uint64)
        return ((words >> np.uint64(11)) + 1.0) * 2.0**-53

    def chosen(self, n: int, rate: float) -> Tensor:
        """Which of n take part, each by itself with chance `rate`; ascending."""
        return torch.from_numpy(np.flatnonzero(self.uniform(n) <= rate))

    def normal(self, shape: torch.Size) -> Tensor:
        """Standard normal float32 by Box and Muller; 53 bits reach out to 8.5 standard deviations."""
        flat = np.empty(shape.numel(), np.float32)
        for begin in range(0, len(flat), 2 * _PAIRS):
            part = flat[begin : begin + 2 * _PAIRS]
            half = (len(part) + 1) // 2
            u = self.uniform(2 * half)
            radius = np.sqrt(-2 * np.log(u[:half]))
            angle = 2 * np.pi * u[half:]
            part[:half] = radius * np.cos(angle)
            part[half:] = (radius * np.sin(angle))[: len(part) - half]
        return torch.from_numpy(flat).view(shape)

    def generator(self) -> torch.Generator:
        """For what only has to be independent of everything, such as augmentation."""
        return torch.Generator().manual_seed(int.from_bytes(self._stream.update(bytes(8)), "little") >> 1)
