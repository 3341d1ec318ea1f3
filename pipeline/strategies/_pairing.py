"""Matching of sites into disjoint pairs of low similarity, greedy or optimal.

Of an odd number of sites one is left out. The same similarity gives the same pairs on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import networkx as nx
import torch
from torch import Tensor

from pipeline.core.errors import StrategyContractError

IndexPairs = list[tuple[int, int]]  # each (i, j) with i < j
NUM_SIMILARITY_LEVELS = 2**40  # similarities are rounded to integers, with which the matching algorithm is exact


def greedy_matching(similarity: Tensor) -> IndexPairs:
    """Repeatedly pairs the two least similar sites that are left; among equals, the first by (i, j)."""
    unmatched = set(range(len(similarity)))
    pairs: IndexPairs = []
    for _, i, j in sorted(_similarity_edges(similarity)):
        if i in unmatched and j in unmatched:
            unmatched -= {i, j}
            pairs.append((i, j))
    return sorted(pairs)


def optimal_matching(similarity: Tensor) -> IndexPairs:
    """The matching of least total similarity that leaves out at most one site (Edmonds's blossom algorithm, O(S^3))."""
    edges = _similarity_edges(similarity)
    if not edges:
        return []
    low, high = min(edges)[0], max(edges)[0]
    step = (high - low) / NUM_SIMILARITY_LEVELS or 1.0
    graph: nx.Graph[int] = nx.Graph()
    graph.add_weighted_edges_from((i, j, round((high - value) / step)) for value, i, j in edges)
    return sorted((min(pair), max(pair)) for pair in nx.max_weight_matching(graph, maxcardinality=True))


MATCHING_METHODS: Mapping[str, Callable[[Tensor], IndexPairs]] = {
    "greedy": greedy_matching,
    "optimal": optimal_matching,
}


def _similarity_edges(similarity: Tensor) -> list[tuple[float, int, int]]:
    """(similarity, i, j) for all i < j."""
    if similarity.ndim != 2 or len(similarity) != similarity.shape[1]:
        raise StrategyContractError(
            f"a similarity of shape {tuple(similarity.shape)} cannot be matched; it must be one (S, S) matrix"
        )
    if not bool(torch.isfinite(similarity).all()) or not torch.allclose(similarity, similarity.T):
        raise StrategyContractError(
            "only a finite, symmetric similarity can be matched; `pairwise_similarity` returns such matrices"
        )
    rows = similarity.double().tolist()
    return [(float(rows[i][j]), i, j) for i in range(len(rows)) for j in range(i + 1, len(rows))]
