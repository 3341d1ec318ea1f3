"""DemLearn (Nguyen et al. 2022, democratized learning): a self-organizing hierarchy of clusters, a model at each node.

    server, every tau rounds  agglomerative clustering of the clients' models; the top `levels` of the tree are kept
            every round       bottom-up: w_C <- sum_c n_c w_c / n_C  over the children c of node C, n in sites;
                                         clients' models count `amplify` times in the first rounds
                              top-down:  w_C <- alpha w_parent + (1 - alpha) w_C
    client k                  from the model w_C of its lowest cluster, local steps on F_k(w) + (mu/2) |w - w_C|^2

With levels = 1, amplify = 1 and mu = 0 it is FedAvg with equal weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from pipeline.core.parameters import ModelState, NamedTensors, ParamVector
from pipeline.protocol.messages import ClientState, ClientTask, Message, Reply, SiteId, Visibility
from pipeline.protocol.tasks import LocalRegularizer, TrainJob, run_training
from pipeline.strategies._clustered import (
    FIRST_CLUSTER,
    ClusteredStrategy,
    ClusterState,
    compute_linkage,
    dendrogram_from_linkage,
    pairwise_distances,
)
from pipeline.strategies.base import ClientRequests, Dendrogram, StrategyContext, make_update, received_model

ClusterPath = str  # of a node in the hierarchy: "0" is the top, "0.1" its second child


@dataclass(frozen=True)
class DemLearnState(ClusterState):
    """Clusters are named by their path; `cluster_of` has the lowest cluster of each site."""

    latest_weights: Mapping[SiteId, ParamVector] = field(default_factory=dict)  # each site's last model
    latest_norm_stats: Mapping[SiteId, ParamVector] = field(default_factory=dict)
    deltas: Mapping[SiteId, ParamVector] = field(default_factory=dict)  # each site's last one, to cluster by "deltas"
    num_rounds: int = 0
    next_clustering_round: int = 1
    clustering_interval: float = 1.0  # rounds
    leaves: tuple[SiteId, ...] = ()  # of the last dendrogram, with `merges`
    merges: tuple[tuple[int, int, float, int], ...] = ()


class DemLearn(ClusteredStrategy):
    description: ClassVar[str] = "sites are clustered into a tree by their models, and each cluster has a model"
    paper: ClassVar[str] = "Nguyen et al. 2022, arXiv 2007.03278"
    state_type: ClassVar[type] = DemLearnState
    personalized: ClassVar[bool] = True
    partial_updates: ClassVar[Literal["drop", "keep"]] = "keep"
    bypasses_aggregation_rule: ClassVar[bool] = True
    server_state_text: ClassVar[str] = "the hierarchy of clusters with a model each, each site's last model"
    name: Literal["demlearn"] = "demlearn"
    levels: PositiveInt = 3  # of the hierarchy, with the top; 1: one model for all
    alpha: float = Field(0.5, ge=0, le=1)  # share of the parent's model that a cluster's model takes
    alpha_decay: float = Field(1.0, gt=0, le=1)  # factor on alpha every round; below 1 clusters specialize
    mu: float = Field(0.001, ge=0)  # strength of the proximal term at the clients
    mu_decay: float = Field(1.0, gt=0, le=1)  # factor on mu every round
    proximal_to: Literal["cluster", "all"] = "cluster"  # the lowest cluster, or it and all above, each by 1 / its sites
    tau: PositiveInt = 1  # rounds between clusterings
    tau_growth: float = Field(1.0, ge=1)  # factor on tau after every clustering: from plastic to stable
    amplify: float = Field(1.15, gt=0)  # factor on the clients' models when they enter their lowest cluster's
    amplify_rounds: NonNegativeInt = 5  # first rounds in which `amplify` applies
    linkage: Literal["centroid", "average", "ward"] = "centroid"  # ward (ours) gives clusters of similar size
    cluster_by: Literal["weights", "deltas"] = "weights"  # distance of the models, or of their last deltas

    @property
    def visibility(self) -> Visibility:
        return "each"

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> DemLearnState:
        return DemLearnState(
            {FIRST_CLUSTER: initial_model.weights},
            {FIRST_CLUSTER: initial_model.norm_stats},
            {},
            clustering_interval=float(self.tau),
        )

    def run_round(
        self, state: DemLearnState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> DemLearnState:
        replies = requests.collect({site: self.train_payload(state, site) for site in clients})
        deltas = {r.site: r.update.averaged["delta"] for r in replies}
        state = replace(
            state,
            cluster_of={**state.cluster_of} | {r.site: state.cluster_of.get(r.site, FIRST_CLUSTER) for r in replies},
            latest_weights={**state.latest_weights}
            | {s: self.train_payload(state, s)["weights"] + delta for s, delta in deltas.items()},
            latest_norm_stats={**state.latest_norm_stats} | {r.site: r.update.averaged["stats"] for r in replies},
            deltas={**state.deltas} | deltas if self.cluster_by == "deltas" else {},
            num_rounds=state.num_rounds + 1,
        )
        if state.num_rounds >= state.next_clustering_round:
            state = self._recluster(state)
        return self._mix_levels(state)

    def _recluster(self, state: DemLearnState) -> DemLearnState:
        """Clusters all sites that have replied, and cuts the dendrogram `levels` deep."""
        sites = tuple(state.latest_weights)
        interval = state.clustering_interval * self.tau_growth
        state = replace(
            state,
            next_clustering_round=state.num_rounds + max(1, round(state.clustering_interval)),
            clustering_interval=interval,
        )
        if len(sites) < 2 or self.levels == 1:
            return replace(state, cluster_of=dict.fromkeys(sites, FIRST_CLUSTER))
        vectors = state.latest_weights if self.cluster_by == "weights" else state.deltas
        merges = compute_linkage(pairwise_distances([vectors[site] for site in sites]), self.linkage)
        dendrogram = dendrogram_from_linkage(sites, merges)
        return replace(
            state,
            cluster_of=cut_dendrogram(sites, merges, self.levels),
            leaves=dendrogram.leaves,
            merges=dendrogram.merges,
        )

    def _mix_levels(self, state: DemLearnState) -> DemLearnState:
        """All clusters' models, bottom-up, then top-down. Norm statistics are averaged, neither amplified nor mixed."""
        weights: dict[ClusterPath, ParamVector] = {}
        norm_stats: dict[ClusterPath, ParamVector] = {}
        amplification = self.amplify if state.num_rounds <= self.amplify_rounds else 1.0
        sizes = cluster_sizes(state.cluster_of)
        for path in sorted(sizes, key=lambda p: -p.count(".")):  # bottom-up
            members = [site for site, cluster in state.cluster_of.items() if cluster == path]
            children = [p for p in sizes if p.rpartition(".")[0] == path]
            contributions = [(state.latest_weights[s] * amplification, state.latest_norm_stats[s], 1) for s in members]
            contributions += [(weights[p], norm_stats[p], sizes[p]) for p in children]
            weights[path] = sum_vectors([w * n for w, _, n in contributions]) / sizes[path]
            norm_stats[path] = sum_vectors([v * n for _, v, n in contributions]) / sizes[path]
        alpha = self.alpha * self.alpha_decay ** (state.num_rounds - 1)
        for path in sorted(sizes, key=lambda p: p.count(".")):  # top-down
            if parent := path.rpartition(".")[0]:
                weights[path] = alpha * weights[parent] + (1 - alpha) * weights[path]
        return replace(state, weights=weights, norm_stats=norm_stats)

    def train_payload(self, state: DemLearnState, site: SiteId) -> NamedTensors:
        """The model of the lowest cluster. With proximal_to = "all" also the sum of the proximal terms as one: `slope`
        is the sum of 1 / size over the cluster and all above it, `anchor` the sum of w / size."""
        cluster = state.cluster_of.get(site, FIRST_CLUSTER)
        vectors = {"weights": state.weights[cluster], "stats": state.norm_stats[cluster]}
        if self.proximal_to == "cluster":
            return vectors
        sizes = cluster_sizes(state.cluster_of) or {FIRST_CLUSTER: 1}
        ancestors = [(state.weights[path], 1 / sizes[path]) for path in ancestor_paths(cluster)]
        return vectors | {
            "anchor": sum_vectors([w * factor for w, factor in ancestors]),
            "slope": torch.tensor(sum(factor for _, factor in ancestors)),
        }

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w = message.vectors["weights"]
        mu = self.mu * self.mu_decay ** (message.round - 1)
        slope, anchor = (
            (float(message.vectors["slope"]), message.vectors["anchor"]) if "anchor" in message.vectors else (1.0, w)
        )
        regularizer = LocalRegularizer(mu * slope, -mu * anchor) if mu else LocalRegularizer()
        result = yield from run_training(
            TrainJob(w, message.vectors["stats"], steps=context.steps, epochs=context.epochs, regularizer=regularizer)
        )
        return make_update(w, result), client_state

    def eval_payload(self, state: DemLearnState, site: SiteId) -> NamedTensors:
        """The site's last model, its lowest cluster's ("cluster/") and the top one ("global/")."""
        cluster = state.cluster_of.get(site, FIRST_CLUSTER)
        personal = (
            state.latest_weights.get(site, state.weights[cluster]),
            state.latest_norm_stats.get(site, state.norm_stats[cluster]),
        )
        models = {"": personal} | {
            f"{name}/": (state.weights[model_cluster], state.norm_stats[model_cluster])
            for name, model_cluster in (("cluster", cluster), ("global", FIRST_CLUSTER))
        }
        return {
            f"{name}{part}": v
            for name, model in models.items()
            for part, v in zip(("weights", "stats"), model, strict=True)
        }

    def comparison_models(self, message: Message) -> Mapping[str, ModelState]:
        if "global/weights" not in message.vectors:
            return {"global": received_model(message)}
        return {
            n: ModelState(message.vectors[f"{n}/weights"], message.vectors[f"{n}/stats"]) for n in ("cluster", "global")
        }

    def global_models(self, state: DemLearnState) -> Mapping[str, ModelState]:
        site_models = {
            f"site/{site}": ModelState(w, state.latest_norm_stats[site]) for site, w in state.latest_weights.items()
        }
        cluster_models = {
            f"cluster/{p}": ModelState(w, state.norm_stats[p]) for p, w in state.weights.items() if p != FIRST_CLUSTER
        }
        return (
            {"global": ModelState(state.weights[FIRST_CLUSTER], state.norm_stats[FIRST_CLUSTER])}
            | cluster_models
            | site_models
        )

    def joinable_clusters(self, state: DemLearnState) -> Mapping[str, ModelState]:
        lowest_clusters = set(state.cluster_of.values()) or {FIRST_CLUSTER}
        return {p: ModelState(state.weights[p], state.norm_stats[p]) for p in sorted(lowest_clusters)}

    def on_client_joined(self, state: DemLearnState, reply: Reply) -> DemLearnState:
        model = self.train_payload(state, reply.site)["weights"] + reply.update.averaged["delta"]
        norm_stats = {**state.latest_norm_stats, reply.site: reply.update.averaged["stats"]}
        return replace(state, latest_weights={**state.latest_weights, reply.site: model}, latest_norm_stats=norm_stats)

    def dendrogram(self, state: DemLearnState) -> Dendrogram | None:
        return Dendrogram(state.leaves, state.merges) if state.merges else None


def cut_dendrogram(sites: Sequence[SiteId], merges: np.ndarray, levels: int) -> dict[SiteId, ClusterPath]:
    """The lowest cluster of each site, at most `levels` deep. The first child is the one with the earliest site."""
    from scipy.cluster.hierarchy import ClusterNode, to_tree

    path_of: dict[SiteId, ClusterPath] = {}

    def descend(node: ClusterNode, path: ClusterPath, depth: int) -> None:
        if depth == levels or node.is_leaf():
            path_of.update(dict.fromkeys((sites[leaf] for leaf in node.pre_order()), path))
            return
        children: list[Any] = sorted((node.get_left(), node.get_right()), key=lambda child: min(child.pre_order()))
        for index, child in enumerate(children):
            descend(child, f"{path}.{index}", depth + 1)

    descend(to_tree(merges), FIRST_CLUSTER, 1)
    return {site: path_of[site] for site in sites}


def ancestor_paths(path: ClusterPath) -> list[ClusterPath]:
    """The path itself and all above it, from the bottom up."""
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]


def cluster_sizes(path_of: Mapping[SiteId, ClusterPath]) -> dict[ClusterPath, int]:
    """Number of sites in each cluster, including those of the clusters below it."""
    sizes: dict[ClusterPath, int] = {}
    for path in path_of.values():
        for ancestor in ancestor_paths(path):
            sizes[ancestor] = sizes.get(ancestor, 0) + 1
    return sizes


def sum_vectors(vectors: Sequence[ParamVector]) -> ParamVector:
    return torch.stack(list(vectors)).sum(0)
