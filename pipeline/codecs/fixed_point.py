"""Fixed-point encoding modulo 2^bits, for sums under masks (Bonawitz et al. 2017, doi 10.1145/3133956.3133982).

A vector of P numbers is clipped to the 2-norm C and stochastically rounded to multiples of C / (10 sqrt(P)): unbiased
except for the clipping, with a norm of at most 1.1 C, which bounds the sensitivity. The sum over all sites cannot overflow
2^bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from pipeline.codecs.base import Codec, EncodedParts, VectorLayout, require_part
from pipeline.codecs.stochastic_rounding import CHUNK_SIZE, DITHER_UNIT, UniformDither
from pipeline.core.errors import MessageError
from pipeline.core.parameters import ParamVector


@dataclass(frozen=True)
class QuantizationGrid:
    """The rounding grid for n numbers with a 2-norm of at most `max_norm`, summed over `num_clients` sites."""

    n: int
    max_norm: float
    num_clients: int
    steps_per_coordinate: float = 10.0

    @classmethod
    def create_finest(cls, n: int, max_norm: float, num_clients: int) -> QuantizationGrid:
        """The finest grid whose sums fit into 32 bits."""
        return cls(n, max_norm, num_clients, ((2**31 - 1) // num_clients - 1) / math.sqrt(max(1, n)))

    @property
    def steps_per_max_norm(self) -> float:
        """C in steps: steps_per_coordinate * sqrt(P)."""
        return self.steps_per_coordinate * math.sqrt(max(1, self.n))

    @property
    def max_rounded_norm(self) -> float:
        """Bound on the 2-norm of a clipped and rounded vector: rounding moves every number by less than one step."""
        return self.max_norm * (1 + 1 / self.steps_per_coordinate)

    @property
    def step_size(self) -> float:
        return self.max_norm / self.steps_per_max_norm

    @property
    def num_levels(self) -> int:
        return math.ceil(self.steps_per_max_norm)

    @property
    def num_bits(self) -> int:
        """ceil(log2(2 * num_clients * num_levels + 1))"""
        return (2 * self.num_clients * self.num_levels).bit_length()

    @property
    def dtype(self) -> torch.dtype:
        if self.num_bits > 32:
            raise MessageError(
                f"the sum of {self.n} numbers over {self.num_clients} sites takes {self.num_bits} bits per number, "
                "and fixed-point codes have at most 32; sum over fewer sites or train fewer parameters"
            )
        return torch.int16 if self.num_bits <= 16 else torch.int32


class FixedPointCodec(Codec):
    paper: ClassVar[str] = "Bonawitz et al. 2017, doi 10.1145/3133956.3133982"
    description: ClassVar[str] = "fixed-point integers for secure aggregation"
    name: Literal["ring"] = "ring"
    max_norm: PositiveFloat

    def quantization_grid(self, n: int, layout: VectorLayout) -> QuantizationGrid:
        return QuantizationGrid(n, self.max_norm, layout.num_clients)

    def encode(self, x: ParamVector, layout: VectorLayout, generator: torch.Generator) -> tuple[EncodedParts, None]:
        grid = self.quantization_grid(len(x), layout)
        return {"whole": _round_to_grid(x, grid, generator, grid.dtype)}, None

    def remaining_length(self, n: int, layout: VectorLayout) -> None:
        return None

    def decode(self, parts: EncodedParts, remainder: ParamVector | None, n: int, layout: VectorLayout) -> ParamVector:
        grid = self.quantization_grid(n, layout)
        return decode_fixed_point(require_part(parts, "whole", grid.dtype, n), grid)


def encode_fixed_point(x: ParamVector, grid: QuantizationGrid, generator: torch.Generator) -> Tensor:
    """int64 in 0 .. 2^bits - 1."""
    return _round_to_grid(x, grid, generator, torch.int64).bitwise_and_(2**grid.num_bits - 1)


def decode_fixed_point(ring_sum: Tensor, grid: QuantizationGrid) -> ParamVector:
    """The sum of the vectors whose codes sum to `ring_sum` modulo 2^bits (of any integer type)."""
    half_range, max_magnitude = 2 ** (grid.num_bits - 1), grid.num_clients * grid.num_levels
    x = torch.empty(len(ring_sum))
    for out, residues in zip(x.split(CHUNK_SIZE), ring_sum.split(CHUNK_SIZE), strict=True):
        integers = (
            residues.to(torch.int64, copy=True).add_(half_range).bitwise_and_(2 * half_range - 1).sub_(half_range)
        )  # -half to half - 1
        if len(integers) and max(map(abs, torch.stack(integers.aminmax()).tolist())) > max_magnitude:
            raise MessageError(
                f"a fixed-point sum exceeds the range of {grid.num_clients} sites; it is damaged, or a mask was not removed"
            )
        out.copy_(integers.double().mul_(grid.step_size))
    return x


def _round_to_grid(x: ParamVector, grid: QuantizationGrid, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Integers from -num_levels to num_levels. In float64: float32 cannot hold the fraction of a large integer."""
    norm = math.sqrt(sum(float(torch.dot(d, d)) for d in (chunk.double() for chunk in x.split(CHUNK_SIZE))))
    factor = grid.steps_per_max_norm / max(grid.max_norm, norm)
    integers = torch.empty(len(x), dtype=dtype)
    dither = UniformDither(generator)
    for out, chunk in zip(integers.split(CHUNK_SIZE), x.split(CHUNK_SIZE), strict=True):
        y = chunk.double().mul_(factor).add_(0.5).add_(dither(len(chunk)), alpha=DITHER_UNIT)
        out.copy_(y.floor_().clamp_(-grid.num_levels, grid.num_levels))
    return integers
