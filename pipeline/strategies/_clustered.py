"""Clustered strategies: the base with one model per cluster, linkage of sites, and stable names of clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.core.parameters import ModelState, NamedTensors, ParamVector
from pipeline.protocol.messages import SiteId
from pipeline.strategies.base import Dendrogram, Strategy, StrategyContext

FIRST_CLUSTER = "0"


@dataclass(frozen=True)
class ClusterState:
    """Models by cluster, and the cluster of every site that has replied; other sites count to `FIRST_CLUSTER`."""

    weights: Mapping[str, ParamVector]
    norm_stats: Mapping[str, ParamVector]
    cluster_of: Mapping[SiteId, str]


class ClusteredStrategy(Strategy):
    """Base of IFCA, CFL, similarity clustering and DemLearn: a site trains the model of its cluster."""

    server_state_text: ClassVar[str] = "a model per cluster, the cluster of each site"

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> Any:
        return ClusterState({FIRST_CLUSTER: initial_model.weights}, {FIRST_CLUSTER: initial_model.norm_stats}, {})

    def train_payload(self, state: Any, site: SiteId) -> NamedTensors:
        cluster = state.cluster_of.get(site, FIRST_CLUSTER)
        return {"weights": state.weights[cluster], "stats": state.norm_stats[cluster]}

    def global_models(self, state: Any) -> Mapping[str, ModelState]:
        return {f"cluster/{cluster}": ModelState(w, state.norm_stats[cluster]) for cluster, w in state.weights.items()}

    def cluster_assignment(self, state: Any) -> Mapping[SiteId, str]:
        assignment: Mapping[SiteId, str] = state.cluster_of
        return assignment

    def joinable_clusters(self, state: Any) -> Mapping[str, ModelState]:
        return {cluster: ModelState(w, state.norm_stats[cluster]) for cluster, w in state.weights.items()}

    def assign_cluster(self, state: Any, site: SiteId, cluster: str) -> Any:
        return replace(state, cluster_of={**state.cluster_of, site: cluster})


def pairwise_distances(vectors: Sequence[ParamVector]) -> Tensor:
    """(S, S) Euclidean distances. For more than 25 vectors torch computes |a|^2 + |b|^2 - 2ab, which cancels in float32
    if the models differ little; so their mean is subtracted first, and float64 is used."""
    flat = torch.stack(list(vectors))
    centered = (flat - flat.mean(0)).double()
    return torch.cdist(centered, centered)


def compute_linkage(distances: Tensor, method: Literal["complete", "average", "centroid", "ward"]) -> np.ndarray:
    """Distances (S, S) -> scipy's linkage matrix (S - 1, 4)."""
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    symmetric = distances.double().numpy()
    symmetric = np.maximum((symmetric + symmetric.T) / 2, 0.0)
    np.fill_diagonal(symmetric, 0.0)
    merges: np.ndarray = hierarchy.linkage(squareform(symmetric, checks=False), method)
    return merges


def dendrogram_from_linkage(sites: Sequence[SiteId], merges: np.ndarray) -> Dendrogram:
    return Dendrogram(tuple(sites), tuple((int(a), int(b), float(h), int(n)) for a, b, h, n in merges))


def match_cluster_names(labels: Mapping[SiteId, int], previous: Mapping[SiteId, str]) -> dict[SiteId, str]:
    """Names for new clusters (site -> label): those of the previous clusters that they overlap most with, so that names
    are stable from round to round; others get the first unused numbers."""
    from scipy.optimize import linear_sum_assignment

    new_labels, old_names = sorted(set(labels.values())), sorted(set(previous.values()))
    overlap = np.array(
        [[sum(labels[s] == a and previous.get(s) == b for s in labels) for b in old_names] for a in new_labels]
    )
    names: dict[int, str] = {}
    if old_names:
        rows, columns = linear_sum_assignment(-overlap)
        names = {new_labels[r]: old_names[c] for r, c in zip(rows, columns, strict=True) if overlap[r, c]}
    unused_names = (str(n) for n in range(len(new_labels) + len(old_names)) if str(n) not in names.values())
    names |= {label: next(unused_names) for label in new_labels if label not in names}
    return {site: names[label] for site, label in labels.items()}
