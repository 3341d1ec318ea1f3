"""Random-k (Stich et al. 2018, arXiv 1809.07599): k random coordinates; a seed is sent instead of their indices.

Without error feedback they are multiplied by n/k: unbiased, with n/k times the variance.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from pipeline.codecs.base import EncodedParts, VectorLayout, require_part
from pipeline.codecs.sparsify import SparsifyingCodec, scatter_values
from pipeline.core.parameters import ParamVector


class RandK(SparsifyingCodec):
    paper: ClassVar[str] = "Stich et al. 2018, arXiv 1809.07599"
    description: ClassVar[str] = "numbers at random positions, for which a seed is sent"
    name: Literal["randk"] = "randk"

    @property
    def summary(self) -> str:
        return f"{self.share_text}, at random positions{self.feedback_text}"

    def encode(
        self, x: ParamVector, layout: VectorLayout, generator: torch.Generator
    ) -> tuple[EncodedParts, ParamVector]:
        seed = torch.randint(2**63 - 1, (1,), generator=generator)
        return {"seed": seed}, x[_sample_indices(seed, len(x), self.remaining_length(len(x), layout))]

    def decode(self, parts: EncodedParts, remainder: ParamVector | None, n: int, layout: VectorLayout) -> ParamVector:
        assert remainder is not None  # the chain has checked its length
        seed = require_part(parts, "seed", torch.int64, 1)
        # scaled here and not in encode, so that the next stage does not get larger numbers
        values = remainder if self.error_feedback or not n else remainder * (n / len(remainder))
        return scatter_values(values, _sample_indices(seed, n, len(remainder)), n)


def _sample_indices(seed: Tensor, n: int, k: int) -> Tensor:
    """k of n indices, ascending, uniform over all subsets. Both sides need the same torch release, which is pinned."""
    generator = torch.Generator().manual_seed(int(seed))
    if n <= 4 * k:
        return torch.randperm(n, generator=generator)[:k].sort().values
    candidates = torch.empty(0, dtype=torch.int64)  # drawing until k differ is much faster than shuffling all n
    while len(candidates) < k:
        candidates = torch.cat([candidates, torch.randint(n, (2 * k,), generator=generator)]).unique()
    return candidates[torch.randperm(len(candidates), generator=generator)[:k].sort().values]
