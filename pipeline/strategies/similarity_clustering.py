"""Similarity clustering (after Briggs et al. 2020): hierarchical clustering of client models, FedAvg in each cluster.

    server, every round  w_C <- w_C + weighted mean of delta_i  over the clients i of each cluster C
            every `cluster_every` rounds:
                         D_ij = distance of the last models of sites i and j
                         clusters = the dendrogram of D, cut into k;  w_C = weighted mean of its sites' last models

D is the Euclidean distance of the weights, as in Briggs et al., or 1 - CKA of the activations on public examples,
averaged over the layers (Kornblith et al. 2019); Briggs et al. cluster once and cut at a distance. k = 1 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from pipeline.core.parameters import ModelState, ParamVector
from pipeline.protocol.messages import ClientUpdate, Reply, SiteId, Visibility
from pipeline.strategies._activations import compute_activations
from pipeline.strategies._clustered import (
    FIRST_CLUSTER,
    ClusteredStrategy,
    ClusterState,
    compute_linkage,
    dendrogram_from_linkage,
    match_cluster_names,
    pairwise_distances,
)
from pipeline.strategies.base import ClientRequests, Dendrogram, StrategyContext

DendrogramMerges = tuple[tuple[int, int, float, int], ...]


@dataclass(frozen=True)
class SimilarityClusteringState(ClusterState):
    latest_weights: Mapping[SiteId, ParamVector] = field(default_factory=dict)  # each site's last model
    latest_norm_stats: Mapping[SiteId, ParamVector] = field(default_factory=dict)
    client_weights: Mapping[SiteId, float] = field(default_factory=dict)  # aggregation weight of that model
    num_rounds: int = 0
    leaves: tuple[SiteId, ...] = ()  # of the last dendrogram, with `merges`
    merges: DendrogramMerges = ()


class SimilarityClustering(ClusteredStrategy):
    description: ClassVar[str] = "sites are clustered by how similar their models are, and each cluster has a model"
    paper: ClassVar[str] = (
        "Briggs et al. 2020, arXiv 2004.11791 (by weights); Kornblith et al. 2019, arXiv 1905.00414 (CKA)"
    )
    state_type: ClassVar[type] = SimilarityClusteringState
    server_state_text: ClassVar[str] = "a model per cluster, the cluster of each site, each site's last model"
    name: Literal["similarity_clustering"] = "similarity_clustering"
    k: PositiveInt = 2  # clusters
    cluster_every: PositiveInt = 5  # rounds between clusterings
    cluster_by: Literal["weights", "cka"] = "weights"  # distance of the weights, or 1 - CKA of the activations
    linkage: Literal["ward", "average", "complete"] = "ward"  # for weights; average tends to split off single sites
    num_probes: int = Field(256, ge=4)  # public examples on which networks are compared, for cka

    @property
    def visibility(self) -> Visibility:
        return "each"

    @property
    def needs_public_probes(self) -> bool:
        return self.cluster_by == "cka" and self.k > 1

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> SimilarityClusteringState:
        return SimilarityClusteringState(
            {FIRST_CLUSTER: initial_model.weights}, {FIRST_CLUSTER: initial_model.norm_stats}, {}
        )

    def run_round(
        self,
        state: SimilarityClusteringState,
        clients: Sequence[SiteId],
        requests: ClientRequests,
        context: StrategyContext,
    ) -> SimilarityClusteringState:
        payloads = {site: self.train_payload(state, site) for site in clients}
        replies = requests.collect(payloads)
        cluster_of = {**state.cluster_of} | {r.site: state.cluster_of.get(r.site, FIRST_CLUSTER) for r in replies}
        weights, norm_stats = {**state.weights}, {**state.norm_stats}
        for cluster in weights:
            if cluster_replies := [r for r in replies if cluster_of[r.site] == cluster]:
                aggregate = requests.aggregate_replies(cluster_replies)
                weights[cluster] = weights[cluster] + aggregate.mean("delta")
                norm_stats[cluster] = aggregate.mean("stats")
        latest_weights = {r.site: received_weights(payloads, state, r) + r.update.averaged["delta"] for r in replies}
        state = replace(
            state,
            weights=weights,
            norm_stats=norm_stats,
            cluster_of=cluster_of,
            latest_weights={**state.latest_weights} | latest_weights,
            latest_norm_stats={**state.latest_norm_stats} | {r.site: r.update.averaged["stats"] for r in replies},
            client_weights={**state.client_weights} | {r.site: r.weight for r in replies},
            num_rounds=state.num_rounds + 1,
        )
        should_recluster = state.num_rounds % self.cluster_every == 0 and len(state.latest_weights) > 1 and self.k > 1
        return self._recluster(state, requests) if should_recluster else state

    def _recluster(self, state: SimilarityClusteringState, requests: ClientRequests) -> SimilarityClusteringState:
        """New clusters and their models; if no site changes its cluster, the models stay as they are."""
        from scipy.cluster.hierarchy import fcluster

        sites = tuple(state.latest_weights)
        method = self.linkage if self.cluster_by == "weights" else "average"  # Ward linkage needs Euclidean distances
        merges = compute_linkage(self._compute_distances(state, sites, requests), method)
        labels = fcluster(merges, self.k, "maxclust")
        cluster_of = match_cluster_names(dict(zip(sites, map(int, labels), strict=True)), state.cluster_of)
        dendrogram = dendrogram_from_linkage(sites, merges)
        state = replace(state, leaves=dendrogram.leaves, merges=dendrogram.merges)
        if cluster_of == state.cluster_of:
            return state
        cluster_models = {
            cluster: self._average_latest(state, [s for s in sites if cluster_of[s] == cluster], requests)
            for cluster in sorted(set(cluster_of.values()))
        }
        weights = {cluster: m.weights for cluster, m in cluster_models.items()}
        norm_stats = {cluster: m.norm_stats for cluster, m in cluster_models.items()}
        first_cluster = min(cluster_models)  # its model also is FIRST_CLUSTER's, with which new sites start
        return replace(
            state,
            weights={FIRST_CLUSTER: weights[first_cluster]} | weights,
            norm_stats={FIRST_CLUSTER: norm_stats[first_cluster]} | norm_stats,
            cluster_of=cluster_of,
        )

    def _compute_distances(
        self, state: SimilarityClusteringState, sites: Sequence[SiteId], requests: ClientRequests
    ) -> Tensor:
        if self.cluster_by == "weights":
            return pairwise_distances([state.latest_weights[site] for site in sites])
        from pipeline.strategies._representation_similarity import pairwise_similarity

        models = [ModelState(state.latest_weights[s], state.latest_norm_stats[s]) for s in sites]
        activations, inputs = compute_activations(models, requests, self.num_probes)
        return 1 - pairwise_similarity(activations, inputs, "cka").mean(0)  # mean over the layers

    def _average_latest(
        self, state: SimilarityClusteringState, sites: Sequence[SiteId], requests: ClientRequests
    ) -> ModelState:
        """The mean of the last models of these sites, by the study's aggregation rule."""

        def as_reply(site: SiteId) -> Reply:
            update = ClientUpdate({"model": state.latest_weights[site], "stats": state.latest_norm_stats[site]})
            return Reply(site, "train", state.num_rounds, 0, update, state.client_weights[site])

        aggregate = requests.aggregate_replies([as_reply(site) for site in sites])
        return ModelState(aggregate.mean("model"), aggregate.mean("stats"))

    def dendrogram(self, state: SimilarityClusteringState) -> Dendrogram | None:
        return Dendrogram(state.leaves, state.merges) if state.merges else None


def received_weights(
    payloads: Mapping[SiteId, Mapping[str, ParamVector]], state: SimilarityClusteringState, reply: Reply
) -> ParamVector:
    """The weights that the site started from; for a late reply they are unknown, and its cluster's are taken."""
    if reply.site in payloads:
        return payloads[reply.site]["weights"]
    return state.weights[state.cluster_of.get(reply.site, FIRST_CLUSTER)]
