"""Masks of whole numbers: keystreams added to vectors, modulo 2^bits.

The keystream is AES-256-CTR; every stream has a key of its own, so the counter starts at 0. On machines that have AES
in hardware it is faster than ChaCha20, and AES-128 would gain a tenth (benchmarks/secure_sum.py). Vectors are walked in
pieces through one small buffer, so no second vector is needed, however many streams there are. Unsigned numbers wrap at
their width, which 2^bits divides, so one cut at the end is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from privacy.secure_aggregation.key_exchange import derived

Whole = NDArray[Any]  # (n,) of uint16, uint32 or uint64

CHUNK = 2**18  # bytes
BLOCK = 16  # `update_into` wants up to a block of room to spare
NOTHING = memoryview(bytes(CHUNK))
WIDTHS = ("uint16", "uint32", "uint64")


@dataclass(frozen=True)
class Segment:
    """A part of an answer: n numbers from 0 to 2^bits - 1, in so wide a type."""

    n: int
    bits: int
    dtype: str = "uint32"

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS or self.n < 0 or not 1 <= self.bits <= 8 * np.dtype(self.dtype).itemsize:
            raise ValueError(f"{self.n} numbers of {self.bits} bits in {self.dtype}; take one of {', '.join(WIDTHS)}")

    @classmethod
    def of(cls, numbers: Whole, bits: int) -> Segment:
        return cls(numbers.size, bits, numbers.dtype.name)

    def zeros(self) -> Whole:
        return np.zeros(self.n, self.dtype)

    def takes(self, numbers: Whole) -> bool:
        return numbers.dtype == self.dtype and numbers.shape == (self.n,)

    def cut(self, numbers: Whole) -> Whole:
        """Modulo 2^bits, in place."""
        numbers &= numbers.dtype.type(2**self.bits - 1)
        return numbers


def narrowest(bits: int) -> str:
    """The type that wastes least."""
    return next(width for width in WIDTHS if bits <= 8 * np.dtype(width).itemsize)


def change(vectors: Sequence[Whole], plus: Iterable[bytes], minus: Iterable[bytes]) -> None:
    """Adds the streams of the seeds `plus` and takes away those of `minus`, in place; a key for every seed and vector."""
    plus, minus = list(plus), list(minus)
    for place, vector in enumerate(vectors):
        _change(vector, [_key(seed, place) for seed in plus], [_key(seed, place) for seed in minus])


def _key(seed: bytes, place: int) -> bytes:
    return derived(seed, "stream", str(place))


def _change(vector: Whole, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    streams = [(_stream(key), np.add) for key in plus] + [(_stream(key), np.subtract) for key in minus]
    room = bytearray(CHUNK + BLOCK)
    words = np.frombuffer(room, vector.dtype.newbyteorder("<"), CHUNK // vector.itemsize)
    for start in range(0, len(vector), len(words)):
        piece = vector[start : start + len(words)]
        for stream, apply in streams:
            stream.update_into(NOTHING[: piece.nbytes], room)
            apply(piece, words[: len(piece)], out=piece)


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(BLOCK))).encryptor()
