"""Top-k (Stich et al. 2018, arXiv 1809.07599): the k largest magnitudes and their indices.

Biased: without error feedback small numbers are never sent.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from pipeline.codecs.base import EncodedParts, VectorLayout, require_part
from pipeline.codecs.sparsify import SparsifyingCodec, scatter_values
from pipeline.core.errors import MessageError
from pipeline.core.parameters import ParamVector

_THRESHOLD_SAMPLE_SIZE = 10_000


class TopK(SparsifyingCodec):
    paper: ClassVar[str] = "Stich et al. 2018, arXiv 1809.07599"
    description: ClassVar[str] = "only the largest numbers; with error feedback the rest follows later"
    name: Literal["topk"] = "topk"

    @property
    def summary(self) -> str:
        return f"only the largest {self.share_text}{self.feedback_text}"

    def encode(
        self, x: ParamVector, layout: VectorLayout, generator: torch.Generator
    ) -> tuple[EncodedParts, ParamVector]:
        index = _largest_indices(x.abs(), self.remaining_length(len(x), layout))
        return {"index": index.int()}, x[index]

    def decode(self, parts: EncodedParts, remainder: ParamVector | None, n: int, layout: VectorLayout) -> ParamVector:
        assert remainder is not None  # the chain has checked its length
        index = require_part(parts, "index", torch.int32, self.remaining_length(n, layout))
        if n and (int(index[0]) < 0 or int(index[-1]) >= n or not bool((index[1:] > index[:-1]).all())):
            raise MessageError(f"the indices of an encoded vector do not ascend within 0 .. {n - 1}; it is damaged")
        return scatter_values(remainder, index, n)


def _largest_indices(magnitudes: Tensor, k: int) -> Tensor:
    """Ascending indices of the k largest. A sample gives a threshold, so that about 2k instead of all numbers are sorted."""
    sample = magnitudes[:: max(1, len(magnitudes) // _THRESHOLD_SAMPLE_SIZE)]
    rank = 2 * k * len(sample) // max(1, len(magnitudes)) + 20
    if rank >= len(sample):
        return magnitudes.topk(k, sorted=False).indices.sort().values
    candidates = (magnitudes >= sample.topk(rank).values[-1]).nonzero().squeeze(1)
    if len(candidates) < k:  # the sample was not representative
        candidates = torch.arange(len(magnitudes))
    return candidates[magnitudes[candidates].topk(k, sorted=False).indices].sort().values
