"""What topk and randk share: how many numbers are kept, whether the rest waits for its turn, and putting them back."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from pipeline.codecs.base import Codec, Layout
from pipeline.core.parameters import Vec


class Sparse(Codec):
    """Keeps some numbers and leaves their values to the next stage."""

    share: float = Field(0.01, gt=0, le=1)
    error_feedback: bool = True

    @property
    def feedback(self) -> bool:
        return self.error_feedback

    def left(self, n: int, layout: Layout) -> int:
        return max(1, round(self.share * n)) if n else 0


def scatter(values: Vec, index: Tensor, n: int) -> Vec:
    """n numbers, zero but at `index`."""
    return torch.zeros(n).index_copy_(0, index.long(), values)
