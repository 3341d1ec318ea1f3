"""What a codec is: one stage that turns a flat vector into fewer bytes, and back. Stages chain: topk, then qsgd.

A stage takes the vector, keeps what it needs to undo itself as `parts` (tensors that travel) and hands what is left of
the vector to the next stage. What the last stage leaves over travels as float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pipeline.core.errors import BadMessage
from pipeline.core.parameters import Vec
from pipeline.core.registry import Component
from pipeline.core.tensor_io import finite
from pipeline.protocol.messages import Packed

Parts = Mapping[str, Tensor]
LEFT = "left"  # the part that holds what no stage took


@dataclass(frozen=True)
class Layout:
    """What a stage may know of the vector besides its numbers; both sides know it."""

    sizes: tuple[int, ...] = ()  # of the model's tensors, in order
    sites: int = 1  # how many replies may be added up

    def tensors(self, n: int) -> tuple[int, ...]:
        """The lengths of the tensors in a vector of n numbers: one tensor if it is not the whole model."""
        return self.sizes if sum(self.sizes) == n else (n,)


ANY = Layout()


class Codec(Component):
    paper: ClassVar[str] = ""
    about: ClassVar[str]  # one line for `hemofed strategies`
    downward: ClassVar[bool] = False  # makes sense for whole models, coordinator to site, not only for differences

    @property
    def feedback(self) -> bool:
        """Whether what was lost is kept at the site and added to the next update."""
        return False

    @abstractmethod
    def encode(self, x: Vec, layout: Layout, dice: torch.Generator) -> tuple[Parts, Vec | None]:
        """What travels, and what is left for the next stage (None: nothing)."""

    @abstractmethod
    def left(self, n: int, layout: Layout) -> int | None:
        """How many numbers `encode` leaves of n; None where it leaves nothing."""

    @abstractmethod
    def decode(self, parts: Parts, left: Vec | None, n: int, layout: Layout) -> Vec:
        """The n numbers; raises BadMessage where the parts cannot be an encoding of n numbers."""


Chain = Sequence[Codec]


def feeds_back(chain: Chain) -> bool:
    return any(codec.feedback for codec in chain)


def encode(chain: Chain, x: Vec, layout: Layout, dice: torch.Generator) -> Packed:
    if not finite(x):
        raise BadMessage("a vector that is not finite cannot be encoded; lower local.lr or look at the site's data")
    parts: dict[str, Tensor] = {}
    rest: Vec | None = x
    for codec, place in _stages(chain):
        assert rest is not None  # the study refuses a stage behind one that leaves nothing
        own, rest = codec.encode(rest, layout, dice)
        parts |= {f"{place}{key}": value for key, value in own.items()}
    return Packed(len(x), parts if rest is None else parts | {LEFT: rest})


def decode(chain: Chain, packed: Packed, layout: Layout) -> Vec:
    """The vector; BadMessage where the parts cannot have come from this chain."""
    if not 0 <= packed.n < 2**31:  # places are int32
        raise BadMessage(f"an encoded vector claims {packed.n} numbers; it is damaged")
    lengths = [packed.n]
    for codec in chain:
        left = codec.left(lengths[-1], layout)
        if left is None:
            break
        lengths.append(left)
    whole = len(lengths) > len(chain)
    rest = packed.parts.get(LEFT)
    if (rest is not None) != whole or (
        rest is not None and (rest.dtype, rest.shape) != (torch.float32, (lengths[-1],))
    ):
        raise BadMessage("what a codec left over has the wrong length; is the other side's [codec] the same?")
    for (codec, place), n in reversed(list(zip(_stages(chain), lengths, strict=False))):
        own = {k.removeprefix(place): v for k, v in packed.parts.items() if k.startswith(place)}
        rest = codec.decode(own, rest, n, layout)
    assert rest is not None
    if not finite(rest):
        raise BadMessage("a vector is not finite once decoded")
    return rest


def part(parts: Parts, key: str, dtype: torch.dtype, length: int) -> Tensor:
    """A part as it has to be, or BadMessage."""
    found = parts.get(key)
    if found is None or found.dtype != dtype or found.shape != (length,):
        seen = "nothing" if found is None else f"{tuple(found.shape)} of {found.dtype}"
        raise BadMessage(f"an encoded vector holds {seen} as {key!r}, not {length} of {dtype}; it is damaged")
    return found


def _stages(chain: Chain) -> Iterator[tuple[Codec, str]]:
    return ((codec, f"{place}.{codec.name}.") for place, codec in enumerate(chain))
