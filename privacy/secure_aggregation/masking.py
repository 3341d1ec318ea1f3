"""Masks: keystreams added to vectors of unsigned integers, modulo 2^bits.

The keystream is AES-256-CTR; each stream has its own key, so the counter starts at 0. With AES in hardware it is faster
than ChaCha20, and AES-128 would be 10 % faster (benchmarks/secure_aggregation.py). Vectors are processed in chunks through one
small buffer, so no second vector is needed for any number of streams. Unsigned integers wrap at their width, which
2^bits divides, so one reduction at the end is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from privacy.secure_aggregation.key_exchange import derive_key

UintArray = NDArray[Any]  # (n,) of uint16, uint32 or uint64

CHUNK_BYTES = 2**18
AES_BLOCK_BYTES = 16  # `update_into` needs up to one block of spare space
ZERO_CHUNK = memoryview(bytes(CHUNK_BYTES))
DTYPES = ("uint16", "uint32", "uint64")


@dataclass(frozen=True)
class MaskedSegment:
    """Layout of one masked vector: `num_values` integers from 0 to 2^bits - 1 of type `dtype`."""

    num_values: int
    bits: int
    dtype: str = "uint32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.num_values < 0 or not 1 <= self.bits <= 8 * np.dtype(self.dtype).itemsize:
            raise ValueError(
                f"{self.num_values} numbers of {self.bits} bits in {self.dtype}; take one of {', '.join(DTYPES)}"
            )

    @classmethod
    def from_array(cls, values: UintArray, bits: int) -> MaskedSegment:
        return cls(values.size, bits, values.dtype.name)

    def zeros(self) -> UintArray:
        return np.zeros(self.num_values, self.dtype)

    def matches(self, values: UintArray) -> bool:
        return values.dtype == self.dtype and values.shape == (self.num_values,)

    def reduce_modulo(self, values: UintArray) -> UintArray:
        """Modulo 2^bits, in place."""
        values &= values.dtype.type(2**self.bits - 1)
        return values


def narrowest_dtype(bits: int) -> str:
    """The smallest type with at least `bits` bits."""
    return next(dtype for dtype in DTYPES if bits <= 8 * np.dtype(dtype).itemsize)


def apply_masks(vectors: Sequence[UintArray], added_seeds: Iterable[bytes], removed_seeds: Iterable[bytes]) -> None:
    """Adds and subtracts the streams of the seeds, in place. Each pair of seed and vector has its own key."""
    added_seeds, removed_seeds = list(added_seeds), list(removed_seeds)
    for index, vector in enumerate(vectors):
        _apply_streams(
            vector,
            [_stream_key(seed, index) for seed in added_seeds],
            [_stream_key(seed, index) for seed in removed_seeds],
        )


def _stream_key(seed: bytes, index: int) -> bytes:
    return derive_key(seed, "stream", str(index))


def _apply_streams(vector: UintArray, added_keys: Sequence[bytes], removed_keys: Sequence[bytes]) -> None:
    streams = [(_open_stream(key), np.add) for key in added_keys] + [
        (_open_stream(key), np.subtract) for key in removed_keys
    ]
    buffer = bytearray(CHUNK_BYTES + AES_BLOCK_BYTES)
    keystream = np.frombuffer(buffer, vector.dtype.newbyteorder("<"), CHUNK_BYTES // vector.itemsize)
    for start in range(0, len(vector), len(keystream)):
        chunk = vector[start : start + len(keystream)]
        for stream, apply_ufunc in streams:
            stream.update_into(ZERO_CHUNK[: chunk.nbytes], buffer)
            apply_ufunc(chunk, keystream[: len(chunk)], out=chunk)


def _open_stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(AES_BLOCK_BYTES))).encryptor()
