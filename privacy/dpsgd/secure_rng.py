"""Secret random numbers: a key from the operating system, expanded by AES-256 in counter mode.

Poisson samples, noise and masks must not be derivable from the study: anyone who knows them can subtract the noise.
Torch's generator is not sufficient: on a CPU its seed has 32 bits, which can be enumerated, and its stream is
predictable.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_PAIRS_PER_CHUNK = 1 << 15  # so that the float64 intermediates stay in the cache


class SecureRandom:
    """`key`: 32 bytes, for tests only; by default a new one from the operating system."""

    def __init__(self, key: bytes | None = None) -> None:
        self._stream = Cipher(algorithms.AES256(key or os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def uniform(self, n: int) -> np.ndarray:
        """(n,) float64 in (0, 1] with 53 random bits each."""
        words = np.frombuffer(self._stream.update(bytes(8 * n)), np.uint64)
        return ((words >> np.uint64(11)) + 1.0) * 2.0**-53

    def poisson_sample(self, n: int, sampling_rate: float) -> Tensor:
        """Ascending indices from 0 to n - 1, each included independently with probability `sampling_rate`."""
        return torch.from_numpy(np.flatnonzero(self.uniform(n) <= sampling_rate))

    def normal(self, shape: torch.Size) -> Tensor:
        """Standard normal float32 by Box and Muller; 53 bits reach 8.5 standard deviations."""
        values = np.empty(shape.numel(), np.float32)
        for start in range(0, len(values), 2 * _PAIRS_PER_CHUNK):
            chunk = values[start : start + 2 * _PAIRS_PER_CHUNK]
            half = (len(chunk) + 1) // 2
            u = self.uniform(2 * half)
            radius = np.sqrt(-2 * np.log(u[:half]))
            angle = 2 * np.pi * u[half:]
            chunk[:half] = radius * np.cos(angle)
            chunk[half:] = (radius * np.sin(angle))[: len(chunk) - half]
        return torch.from_numpy(values).view(shape)

    def torch_generator(self) -> torch.Generator:
        """For randomness that must be independent but not secret, such as augmentation."""
        return torch.Generator().manual_seed(int.from_bytes(self._stream.update(bytes(8)), "little") >> 1)
