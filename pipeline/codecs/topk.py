"""Top-k (Stich et al. 2018, arXiv 1809.07599): the k largest magnitudes and where they are.

Biased: without error feedback the small numbers would never arrive.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from pipeline.codecs.base import Layout, Parts, part
from pipeline.codecs.sparsify import Sparse, scatter
from pipeline.core.errors import BadMessage
from pipeline.core.parameters import Vec

_SAMPLE = 10_000


class TopK(Sparse):
    paper: ClassVar[str] = "Stich et al. 2018, arXiv 1809.07599"
    about: ClassVar[str] = "only the largest numbers; the rest waits for its turn"
    name: Literal["topk"] = "topk"

    def encode(self, x: Vec, layout: Layout, dice: torch.Generator) -> tuple[Parts, Vec]:
        index = _largest(x.abs(), self.left(len(x), layout))
        return {"index": index.int()}, x[index]

    def decode(self, parts: Parts, left: Vec | None, n: int, layout: Layout) -> Vec:
        assert left is not None  # the chain has checked its length
        index = part(parts, "index", torch.int32, self.left(n, layout))
        if n and (int(index[0]) < 0 or int(index[-1]) >= n or not bool((index[1:] > index[:-1]).all())):
            raise BadMessage(f"the places in an encoded vector do not ascend from 0 to {n - 1}; it is damaged")
        return scatter(left, index, n)


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Ascending places of the k largest. A sample tells which of them to sort at all: about 2k instead of all."""
    sample = sizes[:: max(1, len(sizes) // _SAMPLE)]
    rank = 2 * k * len(sample) // max(1, len(sizes)) + 20
    if rank >= len(sample):
        return sizes.topk(k, sorted=False).indices.sort().values
    likely = (sizes >= sample.topk(rank).values[-1]).nonzero().squeeze(1)
    if len(likely) < k:  # the sample misled
        likely = torch.arange(len(sizes))
    return likely[sizes[likely].topk(k, sorted=False).indices].sort().values
