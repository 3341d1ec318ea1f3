"""Whole numbers on a ring, which add up under masks (Bonawitz et al. 2017, doi 10.1145/3133956.3133982).

A vector of P numbers is scaled down to the 2-norm C if it is longer, and rounded at random to multiples of
C / (10 sqrt(P)): unbiased up to the clipping, and never longer than 1.1 C, for which noise can be calibrated. Modulo
2^bits the sum of all sites cannot overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from pipeline.codecs.base import Codec, Layout, Parts, part
from pipeline.codecs.stochastic_rounding import CHUNK, UNIT, Draws
from pipeline.core.errors import BadMessage
from pipeline.core.parameters import Vec


@dataclass(frozen=True)
class Grid:
    """How vectors of n numbers with a 2-norm of at most `clip` are rounded, so that those of so many sites add up."""

    n: int
    clip: float
    sites: int
    fine: float = 10.0

    @classmethod
    def finest(cls, n: int, clip: float, sites: int) -> Grid:
        """As fine as 32 bits allow."""
        return cls(n, clip, sites, ((2**31 - 1) // sites - 1) / math.sqrt(max(1, n)))

    @property
    def per_clip(self) -> float:
        """Steps in C: fine * sqrt(P)."""
        return self.fine * math.sqrt(max(1, self.n))

    @property
    def longest(self) -> float:
        """2-norm that a clipped vector has at most once it is rounded: every number moves by less than a step."""
        return self.clip * (1 + 1 / self.fine)

    @property
    def step(self) -> float:
        return self.clip / self.per_clip

    @property
    def levels(self) -> int:
        return math.ceil(self.per_clip)

    @property
    def bits(self) -> int:
        """ceil(log2(2 * sites * levels + 1))"""
        return (2 * self.sites * self.levels).bit_length()

    @property
    def dtype(self) -> torch.dtype:
        if self.bits > 32:
            raise BadMessage(
                f"the sum of {self.n} numbers over {self.sites} sites takes {self.bits} bits a number, and a ring has "
                "at most 32; add up fewer sites or train fewer parameters"
            )
        return torch.int16 if self.bits <= 16 else torch.int32


class Ring(Codec):
    paper: ClassVar[str] = "Bonawitz et al. 2017, doi 10.1145/3133956.3133982"
    about: ClassVar[str] = "whole numbers of a fixed range that add up under masks"
    name: Literal["ring"] = "ring"
    clip: PositiveFloat

    def grid(self, n: int, layout: Layout) -> Grid:
        return Grid(n, self.clip, layout.sites)

    def encode(self, x: Vec, layout: Layout, dice: torch.Generator) -> tuple[Parts, None]:
        grid = self.grid(len(x), layout)
        return {"whole": _rounded(x, grid, dice, grid.dtype)}, None

    def left(self, n: int, layout: Layout) -> None:
        return None

    def decode(self, parts: Parts, left: Vec | None, n: int, layout: Layout) -> Vec:
        grid = self.grid(n, layout)
        return from_ring(part(parts, "whole", grid.dtype, n), grid)


def to_ring(x: Vec, grid: Grid, dice: torch.Generator) -> Tensor:
    """int64 from 0 to 2^bits - 1."""
    return _rounded(x, grid, dice, torch.int64).bitwise_and_(2**grid.bits - 1)


def from_ring(total: Tensor, grid: Grid) -> Vec:
    """The sum of the vectors whose whole numbers add up to `total` modulo 2^bits; of any integer type."""
    half, most = 2 ** (grid.bits - 1), grid.sites * grid.levels
    x = torch.empty(len(total))
    for into, numbers in zip(x.split(CHUNK), total.split(CHUNK), strict=True):
        whole = numbers.to(torch.int64, copy=True).add_(half).bitwise_and_(2 * half - 1).sub_(half)  # -half to half - 1
        if len(whole) and max(map(abs, torch.stack(whole.aminmax()).tolist())) > most:
            raise BadMessage(
                f"a sum on the ring is beyond what {grid.sites} sites can reach; it is damaged, or a mask is left"
            )
        into.copy_(whole.double().mul_(grid.step))
    return x


def _rounded(x: Vec, grid: Grid, dice: torch.Generator, dtype: torch.dtype) -> Tensor:
    """From -levels to levels. In float64: float32 has too few digits left for the fraction of a large whole number."""
    norm = math.sqrt(sum(float(torch.dot(d, d)) for d in (piece.double() for piece in x.split(CHUNK))))
    factor = grid.per_clip / max(grid.clip, norm)
    whole = torch.empty(len(x), dtype=dtype)
    draws = Draws(dice)
    for into, piece in zip(whole.split(CHUNK), x.split(CHUNK), strict=True):
        y = piece.double().mul_(factor).add_(0.5).add_(draws(len(piece)), alpha=UNIT)
        into.copy_(y.floor_().clamp_(-grid.levels, grid.levels))
    return whole
