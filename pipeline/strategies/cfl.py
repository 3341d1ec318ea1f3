"""CFL (Sattler et al. 2020, Algorithm 1): a cluster is split in two when it is stationary but its clients disagree.

    server, for each cluster C  w_C <- w_C + weighted mean of its clients' delta_i  (as FedAvg)
                                if |weighted mean of delta_i| < eps1 and max_i |delta_i| > eps2:
                                    C1, C2 = bipartition of C by the cosine similarity of the delta_i
                                    if the separation gap of (C1, C2) > gap: C becomes C1 and C2, both with model w_C

Norms are in units of the largest |delta_i| of the first round. The bipartition is by complete linkage, as in the
authors' code; the paper's is single linkage. The separation gap g, the least cosine within a half minus the largest
across, tells two populations from noise. A run without a split, for example with eps1 = 0, is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.core.parameters import ModelState, ParamVector
from pipeline.protocol.messages import Reply, SiteId, Visibility
from pipeline.strategies._clustered import FIRST_CLUSTER, ClusteredStrategy, ClusterState, compute_linkage
from pipeline.strategies.base import ClientRequests, Dendrogram, StrategyContext


@dataclass(frozen=True)
class CflState(ClusterState):
    deltas: Mapping[SiteId, ParamVector] = field(default_factory=dict)  # each site's last one in its present cluster
    client_weights: Mapping[SiteId, float] = field(default_factory=dict)  # aggregation weight of that delta
    created_in_round: Mapping[str, int] = field(
        default_factory=dict
    )  # cluster -> the round of the split that created it
    norm_unit: float = 0.0  # the largest norm of a delta in the first round
    splits: tuple[tuple[str, str], ...] = ()  # (the cluster that was split, the new cluster), in order


class Cfl(ClusteredStrategy):
    description: ClassVar[str] = "sites are clustered by how their changes differ, and each cluster has a model"
    paper: ClassVar[str] = "Sattler et al. 2020, arXiv 1910.01991"
    state_type: ClassVar[type] = CflState
    server_state_text: ClassVar[str] = "a model per cluster, the cluster of each site, each site's last delta"
    name: Literal["cfl"] = "cfl"
    eps1: float = Field(0.4, ge=0)  # a cluster is stationary below this norm of its mean delta; 0: it is never split
    eps2: float = Field(0.2, ge=0)  # its clients disagree above this norm of their largest delta
    gap: float = Field(0.1, ge=-2, lt=2)  # separation gap that a split must exceed
    min_cluster_size: int = Field(2, ge=1)  # sites that each half must have

    @property
    def visibility(self) -> Visibility:
        return "each"

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> CflState:
        return CflState({FIRST_CLUSTER: initial_model.weights}, {FIRST_CLUSTER: initial_model.norm_stats}, {})

    def run_round(
        self, state: CflState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> CflState:
        replies = requests.collect({site: self.train_payload(state, site) for site in clients})
        cluster_of = {**state.cluster_of} | {r.site: state.cluster_of.get(r.site, FIRST_CLUSTER) for r in replies}
        # a late reply may be older than the split that created its cluster
        current = [r for r in replies if r.round > state.created_in_round.get(cluster_of[r.site], 0)]
        deltas = {**state.deltas} | {r.site: r.update.averaged["delta"] for r in current}
        client_weights = {**state.client_weights} | {r.site: r.weight for r in current}
        norm_unit = state.norm_unit or max(float(delta.norm()) for delta in deltas.values())
        state = replace(state, cluster_of=cluster_of, deltas=deltas, client_weights=client_weights, norm_unit=norm_unit)
        for cluster in state.weights:
            cluster_replies = [r for r in replies if cluster_of[r.site] == cluster]
            if cluster_replies:
                state = self._update_cluster(state, cluster, cluster_replies, requests)
                state = self._maybe_split_cluster(state, cluster, max(r.round for r in replies))
        return state

    def _update_cluster(
        self, state: CflState, cluster: str, replies: Sequence[Reply], requests: ClientRequests
    ) -> CflState:
        aggregate = requests.aggregate_replies(replies)
        weights = {**state.weights, cluster: state.weights[cluster] + aggregate.mean("delta")}
        return replace(state, weights=weights, norm_stats={**state.norm_stats, cluster: aggregate.mean("stats")})

    def _maybe_split_cluster(self, state: CflState, cluster: str, round_number: int) -> CflState:
        """Waits until every site of the cluster has a delta in it."""
        members = [site for site, site_cluster in state.cluster_of.items() if site_cluster == cluster]
        if len(members) < 2 * self.min_cluster_size or any(site not in state.deltas for site in members):
            return state
        deltas = torch.stack([state.deltas[site] for site in members])
        client_weights = torch.tensor([state.client_weights[site] for site in members])
        is_stationary = float(((client_weights / client_weights.sum()) @ deltas).norm()) < self.eps1 * state.norm_unit
        if not is_stationary or float(deltas.norm(dim=1).max()) <= self.eps2 * state.norm_unit:
            return state
        in_second_half, cosine = bipartition_by_cosine(deltas)
        is_too_small = min(int(in_second_half.sum()), int((~in_second_half).sum())) < self.min_cluster_size
        if is_too_small or separation_gap(cosine, in_second_half) <= self.gap:
            return state
        leaving_sites = [site for site, leaves in zip(members, in_second_half.tolist(), strict=True) if leaves]
        new_cluster = str(len(state.weights))
        return replace(
            state,
            weights={**state.weights, new_cluster: state.weights[cluster]},
            norm_stats={**state.norm_stats, new_cluster: state.norm_stats[cluster]},
            cluster_of={**state.cluster_of} | dict.fromkeys(leaving_sites, new_cluster),
            deltas={site: delta for site, delta in state.deltas.items() if site not in members},
            created_in_round={**state.created_in_round, cluster: round_number, new_cluster: round_number},
            splits=(*state.splits, (cluster, new_cluster)),
        )

    def dendrogram(self, state: CflState) -> Dendrogram | None:
        """The tree of the splits, the first at the top."""
        return dendrogram_from_splits(state.cluster_of, state.splits) if state.splits else None


def bipartition_by_cosine(deltas: Tensor) -> tuple[Tensor, Tensor]:
    """(S, P) -> a mask (S,) of the half that does not contain the first site, and the cosines (S, S)."""
    from scipy.cluster.hierarchy import to_tree

    directions = deltas / deltas.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosine = (directions @ directions.T).clamp(-1, 1)
    in_left_half = torch.zeros(len(deltas), dtype=torch.bool)
    left_child = to_tree(compute_linkage(1 - cosine, "complete")).get_left()
    in_left_half[left_child.pre_order() if left_child else []] = True  # two halves even if all deltas are equal
    return in_left_half != in_left_half[0], cosine


def separation_gap(cosine: Tensor, in_second_half: Tensor) -> float:
    """The paper's g: the least cosine within a half minus the largest across the halves."""
    across = in_second_half[:, None] != in_second_half
    return float(cosine[~across].min() - cosine[across].max())


def dendrogram_from_splits(cluster_of: Mapping[SiteId, str], splits: Sequence[tuple[str, str]]) -> Dendrogram:
    """Sites of a cluster merge at height 0; clusters merge at 1 for the last split, 2 for the one before, and so on."""
    leaves = sorted(cluster_of, key=lambda site: (int(cluster_of[site]), site))
    merges: list[tuple[int, int, float, int]] = []
    nodes: dict[str, Any] = {}  # cluster -> (node, size)

    def merge_nodes(a: tuple[int, int], b: tuple[int, int], height: float) -> tuple[int, int]:
        merges.append((a[0], b[0], height, a[1] + b[1]))
        return len(leaves) + len(merges) - 1, a[1] + b[1]

    for index, site in enumerate(leaves):
        cluster = cluster_of[site]
        nodes[cluster] = merge_nodes(nodes[cluster], (index, 1), 0.0) if cluster in nodes else (index, 1)
    for height, (parent, child) in enumerate(reversed(splits), start=1):
        nodes[parent] = merge_nodes(nodes[parent], nodes[child], float(height))
    return Dendrogram(tuple(leaves), tuple(merges))
