"""Codec: one stage that encodes a flat vector in fewer bytes and decodes it. Stages can be chained: topk, then qsgd.

A stage returns the `parts` that decoding needs (tensors that are sent) and the remainder of the vector for the next
stage. The remainder of the last stage is sent as float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pipeline.core.errors import MessageError
from pipeline.core.parameters import NamedTensors, ParamVector
from pipeline.core.registry import Component
from pipeline.core.tensor_io import is_finite

EncodedParts = Mapping[str, Tensor]
REMAINDER_KEY = "left"  # the part that holds the remainder of the last stage


@dataclass(frozen=True)
class VectorLayout:
    """What a stage knows of the vector besides its numbers; equal at both sides."""

    tensor_sizes: tuple[int, ...] = ()  # of the model's tensors, in order
    num_clients: int = 1  # how many replies may be summed

    def tensor_lengths(self, n: int) -> tuple[int, ...]:
        """The lengths of the tensors in a vector of n numbers; a vector that is not the whole model is one tensor."""
        return self.tensor_sizes if sum(self.tensor_sizes) == n else (n,)


UNKNOWN_LAYOUT = VectorLayout()


class Codec(Component):
    paper: ClassVar[str] = ""
    supports_downlink: ClassVar[bool] = False  # suits whole models, not only differences

    @property
    def has_error_feedback(self) -> bool:
        """Whether the site keeps the encoding error and adds it to its next update."""
        return False

    @property
    def summary(self) -> str:
        """The description with this codec's settings."""
        return self.description

    @abstractmethod
    def encode(
        self, x: ParamVector, layout: VectorLayout, generator: torch.Generator
    ) -> tuple[EncodedParts, ParamVector | None]:
        """The parts that are sent, and the remainder for the next stage (None: no remainder)."""

    @abstractmethod
    def remaining_length(self, n: int, layout: VectorLayout) -> int | None:
        """Length of the remainder that `encode` returns for n numbers; None: no remainder."""

    @abstractmethod
    def decode(self, parts: EncodedParts, remainder: ParamVector | None, n: int, layout: VectorLayout) -> ParamVector:
        """The n numbers; raises MessageError if the parts cannot be an encoding of n numbers."""


CodecChain = Sequence[Codec]


def has_error_feedback(chain: CodecChain) -> bool:
    return any(codec.has_error_feedback for codec in chain)


def encode_vector(chain: CodecChain, x: ParamVector, layout: VectorLayout, generator: torch.Generator) -> EncodedVector:
    if not is_finite(x):
        raise MessageError("a vector that is not finite cannot be encoded; lower local.lr or check the site's data")
    parts: dict[str, Tensor] = {}
    remainder: ParamVector | None = x
    for codec, prefix in _prefixed_stages(chain):
        assert remainder is not None  # study validation refuses a stage after one without remainder
        stage_parts, remainder = codec.encode(remainder, layout, generator)
        parts |= {f"{prefix}{key}": value for key, value in stage_parts.items()}
    return EncodedVector(len(x), parts if remainder is None else parts | {REMAINDER_KEY: remainder})


def decode_vector(chain: CodecChain, encoded: EncodedVector, layout: VectorLayout) -> ParamVector:
    """The vector; raises MessageError if the parts cannot come from this chain."""
    if not 0 <= encoded.n < 2**31:  # indices are int32
        raise MessageError(f"an encoded vector claims {encoded.n} numbers; it is damaged")
    lengths = [encoded.n]
    for codec in chain:
        num_left = codec.remaining_length(lengths[-1], layout)
        if num_left is None:
            break
        lengths.append(num_left)
    has_remainder = len(lengths) > len(chain)
    remainder = encoded.parts.get(REMAINDER_KEY)
    if (remainder is not None) != has_remainder or (
        remainder is not None and (remainder.dtype, remainder.shape) != (torch.float32, (lengths[-1],))
    ):
        raise MessageError("the remainder of a codec has the wrong length; is the other side's [compression] the same?")
    for (codec, prefix), n in reversed(list(zip(_prefixed_stages(chain), lengths, strict=False))):
        stage_parts = {k.removeprefix(prefix): v for k, v in encoded.parts.items() if k.startswith(prefix)}
        remainder = codec.decode(stage_parts, remainder, n, layout)
    assert remainder is not None
    if not is_finite(remainder):
        raise MessageError("a decoded vector is not finite")
    return remainder


def require_part(parts: EncodedParts, key: str, dtype: torch.dtype, length: int) -> Tensor:
    """The part with this dtype and length, or MessageError."""
    value = parts.get(key)
    if value is None or value.dtype != dtype or value.shape != (length,):
        actual = "nothing" if value is None else f"{tuple(value.shape)} of {value.dtype}"
        raise MessageError(f"an encoded vector holds {actual} as {key!r}, not {length} of {dtype}; it is damaged")
    return value


def _prefixed_stages(chain: CodecChain) -> Iterator[tuple[Codec, str]]:
    return ((codec, f"{index}.{codec.name}.") for index, codec in enumerate(chain))


@dataclass(frozen=True)
class EncodedVector:
    """A vector of n numbers, encoded by a chain of codecs."""

    n: int
    parts: NamedTensors
