"""What topk and randk share: the number of coordinates, error feedback, and scattering the values."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from pipeline.codecs.base import Codec, VectorLayout
from pipeline.core.parameters import ParamVector


class SparsifyingCodec(Codec):
    """Selects some coordinates and leaves their values to the next stage."""

    fraction: float = Field(0.01, gt=0, le=1)
    error_feedback: bool = True

    @property
    def has_error_feedback(self) -> bool:
        return self.error_feedback

    @property
    def share_text(self) -> str:
        return f"{100 * self.fraction:g} % of the numbers"

    @property
    def feedback_text(self) -> str:
        return ", with error feedback" if self.error_feedback else ""

    def remaining_length(self, n: int, layout: VectorLayout) -> int:
        return max(1, round(self.fraction * n)) if n else 0


def scatter_values(values: ParamVector, index: Tensor, n: int) -> ParamVector:
    """n numbers: `values` at `index`, zero elsewhere."""
    return torch.zeros(n).index_copy_(0, index.long(), values)
