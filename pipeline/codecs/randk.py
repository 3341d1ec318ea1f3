"""Random-k (Stich et al. 2018, arXiv 1809.07599): k numbers at random places; only a seed tells where.

Without error feedback they are multiplied by n/k, which makes the result unbiased and n/k times as noisy.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from pipeline.codecs.base import Layout, Parts, part
from pipeline.codecs.sparsify import Sparse, scatter
from pipeline.core.parameters import Vec


class RandK(Sparse):
    paper: ClassVar[str] = "Stich et al. 2018, arXiv 1809.07599"
    about: ClassVar[str] = "numbers at random places, without saying where"
    name: Literal["randk"] = "randk"

    def encode(self, x: Vec, layout: Layout, dice: torch.Generator) -> tuple[Parts, Vec]:
        seed = torch.randint(2**63 - 1, (1,), generator=dice)
        return {"seed": seed}, x[_places(seed, len(x), self.left(len(x), layout))]

    def decode(self, parts: Parts, left: Vec | None, n: int, layout: Layout) -> Vec:
        assert left is not None  # the chain has checked its length
        seed = part(parts, "seed", torch.int64, 1)
        # scaled here and not in encode, so that the next stage sees no larger numbers
        values = left if self.error_feedback or not n else left * (n / len(left))
        return scatter(values, _places(seed, n, len(left)), n)


def _places(seed: Tensor, n: int, k: int) -> Tensor:
    """k of n places, ascending, each set of k as likely as any other; in torch, whose release is pinned on both sides."""
    dice = torch.Generator().manual_seed(int(seed))
    if n <= 4 * k:
        return torch.randperm(n, generator=dice)[:k].sort().values
    found = torch.empty(0, dtype=torch.int64)  # a shuffle of all n would take far longer than drawing till k differ
    while len(found) < k:
        found = torch.cat([found, torch.randint(n, (2 * k,), generator=dice)]).unique()
    return found[torch.randperm(len(found), generator=dice)[:k].sort().values]
