"""What topk and randk share: how many numbers are kept, whether the rest waits for its turn, and putting them back."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from pipeline.codecs.base import Codec, VectorLayout
from pipeline.core.parameters import ParamVector


class SparsifyingCodec(Codec):
    """Keeps some numbers and leaves their values to the next stage."""

    fraction: float = Field(0.01, gt=0, le=1)
    error_feedback: bool = True

    @property
    def has_error_feedback(self) -> bool:
        return self.error_feedback

    def remaining_length(self, n: int, layout: VectorLayout) -> int:
        return max(1, round(self.fraction * n)) if n else 0


def scatter_values(values: ParamVector, index: Tensor, n: int) -> ParamVector:
    """n numbers, zero but at `index`."""
    return torch.zeros(n).index_copy_(0, index.long(), values)
