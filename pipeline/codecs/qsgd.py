"""QSGD (Alistarh et al. 2017, arXiv 1610.02132), FedPAQ's quantizer (Reisizadeh et al. 2020, arXiv 1909.13014).

Each number is stochastically rounded to one of the levels -s/s, ..., -1/s, 0, 1/s, ..., s/s of its block's scale, without
bias. The paper's scale is the 2-norm; the largest magnitude is also unbiased and has a much smaller variance. With one bit
the levels are -1 and 1, with the probabilities (1 - x/scale)/2 and (1 + x/scale)/2: unbiased with either scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from pipeline.codecs.base import Codec, EncodedParts, VectorLayout, require_part
from pipeline.codecs.stochastic_rounding import CHUNK_SIZE, DITHER_UNIT, UniformDither
from pipeline.core.errors import MessageError
from pipeline.core.parameters import ParamVector


class _VectorTile(NamedTuple):
    """A cache-sized part of the vector as a matrix with one scale per row."""

    value_range: slice
    scale_range: slice
    shape: tuple[int, int]


class Qsgd(Codec):
    paper: ClassVar[str] = "Alistarh et al. 2017, arXiv 1610.02132; Reisizadeh et al. 2020, arXiv 1909.13014"
    description: ClassVar[str] = "rounded at random to 1, 2, 4 or 8 bits a number, without bias"
    supports_downlink: ClassVar[bool] = True
    name: Literal["qsgd"] = "qsgd"
    bits: Literal[1, 2, 4, 8] = 4
    levels: int | None = Field(None, ge=1, le=127)  # s; determines `bits`
    per: Literal["block", "tensor", "whole"] = "block"
    block: PositiveInt = 256
    scale: Literal["max", "norm"] = "max"

    @model_validator(mode="before")
    @classmethod
    def _bits_follow_levels(cls, table: Any) -> Any:
        if isinstance(table, Mapping) and isinstance(levels := table.get("levels"), int):
            return {"bits": _bits_for_levels(levels)} | dict(table)
        return table

    @model_validator(mode="after")
    def _bits_hold_levels(self) -> Qsgd:
        if self.levels is not None and self.bits != _bits_for_levels(self.levels):
            raise ValueError(
                f"{self.levels} levels are {2 * self.levels + 1} codes, which need {_bits_for_levels(self.levels)} bits, not "
                f"{self.bits}; leave out bits or levels"
            )
        return self

    @property
    def summary(self) -> str:
        return f"rounded at random to {self.bits} bit{'s' if self.bits != 1 else ''} a number"

    @property
    def _half_range(self) -> float:
        """Half the largest code: a code from 0 to 2 * half encodes (code - half) / half of the scale."""
        return self.levels or (0.5 if self.bits == 1 else 2 ** (self.bits - 1) - 1)

    def remaining_length(self, n: int, layout: VectorLayout) -> None:
        return None

    def encode(self, x: ParamVector, layout: VectorLayout, generator: torch.Generator) -> tuple[EncodedParts, None]:
        x = x.contiguous()
        scales = self._compute_scales(x, layout)
        divisors = scales.where(scales > 0, 1.0)[:, None]
        codes = torch.zeros(self._num_packed_bytes(len(x)) * 8 // self.bits, dtype=torch.uint8)
        dither, midpoint = UniformDither(generator), torch.tensor(self._half_range + 0.5)
        for tile in self._iterate_tiles(len(x), layout):
            # not x * (1 / scale): 1 / 1e-40 is inf
            y = x[tile.value_range].view(tile.shape) / divisors[tile.scale_range]
            torch.add(midpoint, y, alpha=self._half_range, out=y)
            y.add_(dither(y.numel()).view(tile.shape), alpha=DITHER_UNIT)  # >= 0, so the cast is a floor
            np.copyto(codes[tile.value_range].numpy(), y.view(-1).numpy(), casting="unsafe")  # 6 times as fast as torch
        return {"codes": _pack_codes(codes, self.bits), "scales": scales}, None

    def decode(self, parts: EncodedParts, remainder: ParamVector | None, n: int, layout: VectorLayout) -> ParamVector:
        packed = require_part(parts, "codes", torch.uint8, self._num_packed_bytes(n))
        rows = sum(rows for rows, _ in self._row_runs(n, layout))
        scales = require_part(parts, "scales", torch.float32, rows)[:, None]
        if not bool(((scales >= 0) & (scales < torch.inf)).all()):
            raise MessageError("an encoded vector has a scale that is negative or not finite; it is damaged")
        codes = _unpack_codes(packed, self.bits)[:n]
        if n and int(codes.amax()) > 2 * self._half_range:
            raise MessageError(
                f"an encoded vector has codes beyond {2 * self._half_range:.0f}; are the other side's levels the same?"
            )
        x = torch.empty(n)
        for tile in self._iterate_tiles(n, layout):
            y = x[tile.value_range].view(tile.shape).copy_(codes[tile.value_range].view(tile.shape))
            # in this order nothing overflows
            y.sub_(self._half_range).div_(self._half_range).mul_(scales[tile.scale_range])
        return x

    def _num_packed_bytes(self, n: int) -> int:
        return -(-n * self.bits // 8)

    def _row_runs(self, n: int, layout: VectorLayout) -> list[tuple[int, int]]:
        """(rows, length): consecutive rows of equal length, each row with its own scale."""
        if self.per == "block":
            runs = [(n // self.block, self.block), (1, n % self.block)]
        else:
            runs = [(1, size) for size in (layout.tensor_lengths(n) if self.per == "tensor" else (n,))]
        return [(rows, length) for rows, length in runs if rows and length]

    def _iterate_tiles(self, n: int, layout: VectorLayout) -> Iterator[_VectorTile]:
        start = first_row = 0
        for rows, length in self._row_runs(n, layout):
            # many short rows, or a part of a long one
            max_rows, max_columns = max(1, CHUNK_SIZE // length), min(CHUNK_SIZE, length)
            for row in range(0, rows, max_rows):
                for column in range(0, length, max_columns):
                    shape = min(max_rows, rows - row), min(max_columns, length - column)
                    offset = start + row * length + column
                    yield _VectorTile(
                        slice(offset, offset + math.prod(shape)),
                        slice(first_row + row, first_row + row + shape[0]),
                        shape,
                    )
            start, first_row = start + rows * length, first_row + rows

    def _compute_scales(self, x: ParamVector, layout: VectorLayout) -> Tensor:
        rows = sum(rows for rows, _ in self._row_runs(len(x), layout))
        if self.scale == "max":
            peaks = torch.zeros(rows)
            for tile in self._iterate_tiles(len(x), layout):
                values, peak = x[tile.value_range].view(tile.shape), peaks[tile.scale_range]
                torch.maximum(peak, torch.maximum(values.amax(1), -values.amin(1)), out=peak)
            return peaks
        squares = torch.zeros(rows, dtype=torch.float64)  # 1e30 squared overflows float32
        for tile in self._iterate_tiles(len(x), layout):
            squares[tile.scale_range] += x[tile.value_range].view(tile.shape).double().square_().sum(1)
        norms = squares.sqrt_().float()
        if bool(norms.isinf().any()):
            raise MessageError("the 2-norm of a vector overflows float32; set scale = 'max' of qsgd")
        return norms


def _bits_for_levels(levels: int) -> int:
    return 2 if levels <= 1 else 4 if levels <= 7 else 8


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Of m bytes, byte i holds the codes i, i + m, i + 2m, ..., the first in the lowest bits: every step is contiguous."""
    rows = codes.view(8 // bits, len(codes) * bits // 8)
    packed = rows[0]
    for index, row in enumerate(rows[1:], 1):
        packed = packed | (row << index * bits)
    return packed


def _unpack_codes(packed: Tensor, bits: int) -> Tensor:
    codes = torch.empty(8 // bits, len(packed), dtype=torch.uint8)
    for index, row in enumerate(codes):
        torch.bitwise_right_shift(packed, index * bits, out=row).bitwise_and_(2**bits - 1)
    return codes.view(-1)
