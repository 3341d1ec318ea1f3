"""QSGD (Alistarh et al. 2017, arXiv 1610.02132), FedPAQ's quantiser (Reisizadeh et al. 2020, arXiv 1909.13014).

Each number becomes one of the levels -s/s, ..., -1/s, 0, 1/s, ..., s/s of its block's scale, at random, so that its mean
is the number itself. The paper's scale is the 2-norm; the largest magnitude is as unbiased and far less noisy. One bit
has two levels, -1 and 1, taken with the probabilities (1 - x/scale)/2 and (1 + x/scale)/2: unbiased with either scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from pipeline.codecs.base import Codec, Layout, Parts, part
from pipeline.codecs.stochastic_rounding import CHUNK, UNIT, Draws
from pipeline.core.errors import BadMessage
from pipeline.core.parameters import Vec


class _Piece(NamedTuple):
    """A cache-sized stretch of the vector, as a table with one scale a row."""

    numbers: slice
    scales: slice
    shape: tuple[int, int]


class Qsgd(Codec):
    paper: ClassVar[str] = "Alistarh et al. 2017, arXiv 1610.02132; Reisizadeh et al. 2020, arXiv 1909.13014"
    about: ClassVar[str] = "unbiased rounding to 1, 2, 4 or 8 bits a number"
    downward: ClassVar[bool] = True
    name: Literal["qsgd"] = "qsgd"
    bits: Literal[1, 2, 4, 8] = 4
    levels: int | None = Field(None, ge=1, le=127)  # s; bits follow
    per: Literal["block", "tensor", "whole"] = "block"
    block: PositiveInt = 256
    scale: Literal["max", "norm"] = "max"

    @model_validator(mode="before")
    @classmethod
    def _bits_follow_levels(cls, table: Any) -> Any:
        if isinstance(table, Mapping) and isinstance(levels := table.get("levels"), int):
            return {"bits": _bits(levels)} | dict(table)
        return table

    @model_validator(mode="after")
    def _bits_hold_levels(self) -> Qsgd:
        if self.levels is not None and self.bits != _bits(self.levels):
            raise ValueError(
                f"{self.levels} levels are {2 * self.levels + 1} codes, which take {_bits(self.levels)} bits, not "
                f"{self.bits}; leave out bits or levels"
            )
        return self

    @property
    def _half(self) -> float:
        """Half the largest code: codes run from 0 to 2 * half and stand for (code - half) / half of the scale."""
        return self.levels or (0.5 if self.bits == 1 else 2 ** (self.bits - 1) - 1)

    def left(self, n: int, layout: Layout) -> None:
        return None

    def encode(self, x: Vec, layout: Layout, dice: torch.Generator) -> tuple[Parts, None]:
        x = x.contiguous()
        scales = self._scales(x, layout)
        divisors = scales.where(scales > 0, 1.0)[:, None]
        codes = torch.zeros(self._bytes(len(x)) * 8 // self.bits, dtype=torch.uint8)
        draws, middle = Draws(dice), torch.tensor(self._half + 0.5)
        for piece in self._pieces(len(x), layout):
            y = x[piece.numbers].view(piece.shape) / divisors[piece.scales]  # not x * (1 / scale): 1 / 1e-40 is inf
            torch.add(middle, y, alpha=self._half, out=y)
            y.add_(draws(y.numel()).view(piece.shape), alpha=UNIT)  # >= 0, so that the cast is a floor
            np.copyto(codes[piece.numbers].numpy(), y.view(-1).numpy(), casting="unsafe")  # 6 times torch's speed
        return {"codes": _pack(codes, self.bits), "scales": scales}, None

    def decode(self, parts: Parts, left: Vec | None, n: int, layout: Layout) -> Vec:
        packed = part(parts, "codes", torch.uint8, self._bytes(n))
        rows = sum(rows for rows, _ in self._runs(n, layout))
        scales = part(parts, "scales", torch.float32, rows)[:, None]
        if not bool(((scales >= 0) & (scales < torch.inf)).all()):
            raise BadMessage("an encoded vector has a scale that is negative or not finite; it is damaged")
        codes = _unpack(packed, self.bits)[:n]
        if n and int(codes.amax()) > 2 * self._half:
            raise BadMessage(
                f"an encoded vector has codes beyond {2 * self._half:.0f}; are the other side's levels the same?"
            )
        x = torch.empty(n)
        for piece in self._pieces(n, layout):
            y = x[piece.numbers].view(piece.shape).copy_(codes[piece.numbers].view(piece.shape))
            y.sub_(self._half).div_(self._half).mul_(scales[piece.scales])  # in this order nothing overflows
        return x

    def _bytes(self, n: int) -> int:
        return -(-n * self.bits // 8)

    def _runs(self, n: int, layout: Layout) -> list[tuple[int, int]]:
        """(rows, length): that many rows of that length follow each other, each row with its scale."""
        if self.per == "block":
            runs = [(n // self.block, self.block), (1, n % self.block)]
        else:
            runs = [(1, size) for size in (layout.tensors(n) if self.per == "tensor" else (n,))]
        return [(rows, length) for rows, length in runs if rows and length]

    def _pieces(self, n: int, layout: Layout) -> Iterator[_Piece]:
        start = first = 0
        for rows, length in self._runs(n, layout):
            tall, wide = max(1, CHUNK // length), min(CHUNK, length)  # many short rows, or a part of a long one
            for row in range(0, rows, tall):
                for column in range(0, length, wide):
                    shape = min(tall, rows - row), min(wide, length - column)
                    at = start + row * length + column
                    yield _Piece(slice(at, at + math.prod(shape)), slice(first + row, first + row + shape[0]), shape)
            start, first = start + rows * length, first + rows

    def _scales(self, x: Vec, layout: Layout) -> Tensor:
        rows = sum(rows for rows, _ in self._runs(len(x), layout))
        if self.scale == "max":
            peaks = torch.zeros(rows)
            for piece in self._pieces(len(x), layout):
                table, peak = x[piece.numbers].view(piece.shape), peaks[piece.scales]
                torch.maximum(peak, torch.maximum(table.amax(1), -table.amin(1)), out=peak)
            return peaks
        squares = torch.zeros(rows, dtype=torch.float64)  # float32 has no square of 1e30
        for piece in self._pieces(len(x), layout):
            squares[piece.scales] += x[piece.numbers].view(piece.shape).double().square_().sum(1)
        norms = squares.sqrt_().float()
        if bool(norms.isinf().any()):
            raise BadMessage("a vector is too long for its 2-norm to be a float32; set scale = 'max' of qsgd")
        return norms


def _bits(levels: int) -> int:
    return 2 if levels <= 1 else 4 if levels <= 7 else 8


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Byte i holds codes i, i + m, i + 2m, ... of m bytes, the first lowest: neighbours stay together in every step."""
    rows = codes.view(8 // bits, len(codes) * bits // 8)
    packed = rows[0]
    for place, row in enumerate(rows[1:], 1):
        packed = packed | (row << place * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    codes = torch.empty(8 // bits, len(packed), dtype=torch.uint8)
    for place, row in enumerate(codes):
        torch.bitwise_right_shift(packed, place * bits, out=row).bitwise_and_(2**bits - 1)
    return codes.view(-1)
