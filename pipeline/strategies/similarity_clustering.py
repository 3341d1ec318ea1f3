"""Clustering by similarity: every `every` rounds sites are grouped anew by how alike their models are, and averaged by group.

Models are compared by their weights (Euclidean distance) or by what they do (1 - CKA, mean over the layers, on public
examples). The tree of sites, by Ward's linkage for weights and average linkage for CKA, is cut into `k`. With k = 1 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from pipeline.core.parameters import Snapshot, Vec
from pipeline.protocol.messages import Reply, Sees, SiteId, Update
from pipeline.strategies._activations import activations
from pipeline.strategies._clustered import FIRST, Grouping, Groups, distances, linkage, named_alike, tree_of
from pipeline.strategies.base import Ask, Plan, Tree

Merges = tuple[tuple[int, int, float, int], ...]


@dataclass(frozen=True)
class State(Groups):
    latest: Mapping[SiteId, Vec] = field(default_factory=dict)  # everybody's last model
    latest_stats: Mapping[SiteId, Vec] = field(default_factory=dict)
    shares: Mapping[SiteId, float] = field(default_factory=dict)  # what everybody's model weighs
    rounds: int = 0
    leaves: tuple[SiteId, ...] = ()
    merges: Merges = ()


class Similarity(Grouping):
    paper: ClassVar[str] = (
        "Briggs et al. 2020, arXiv 2004.11791 (by weights); Kornblith et al. 2019, arXiv 1905.00414 (CKA)"
    )
    state: ClassVar[type] = State
    holds: ClassVar[str] = "a model a group, who is in which, everybody's last model"
    name: Literal["similarity"] = "similarity"
    k: PositiveInt = 2
    every: PositiveInt = 5
    by: Literal["weights", "cka"] = "weights"
    linkage: Literal["ward", "average", "complete"] = "ward"  # for weights; average tends to put one site apart
    probe: int = Field(256, ge=4)  # public examples that networks are compared on, for cka

    @property
    def sees(self) -> Sees:
        return "each"

    @property
    def probes(self) -> bool:
        return self.by == "cka" and self.k > 1

    def start(self, start: Snapshot, plan: Plan) -> State:
        return State({FIRST: start.weights}, {FIRST: start.stats}, {})

    def round(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> State:
        sends = {site: self.brief(state, site) for site in sites}
        replies = ask.each(sends)
        member = {**state.member} | {r.site: state.member.get(r.site, FIRST) for r in replies}
        weights, stats = {**state.weights}, {**state.stats}
        for group in weights:
            if mine := [r for r in replies if member[r.site] == group]:
                total = ask.combined(mine)
                weights[group], stats[group] = weights[group] + total.mean("delta"), total.mean("stats")
        state = replace(
            state,
            weights=weights,
            stats=stats,
            member=member,
            latest={**state.latest} | {r.site: sends_of(sends, state, r) + r.update.mean["delta"] for r in replies},
            latest_stats={**state.latest_stats} | {r.site: r.update.mean["stats"] for r in replies},
            shares={**state.shares} | {r.site: r.weight for r in replies},
            rounds=state.rounds + 1,
        )
        due = state.rounds % self.every == 0 and len(state.latest) > 1 and self.k > 1
        return self._regrouped(state, ask) if due else state

    def _regrouped(self, state: State, ask: Ask) -> State:
        from scipy.cluster.hierarchy import fcluster

        sites = tuple(state.latest)
        method = self.linkage if self.by == "weights" else "average"  # ward is for Euclidean distances
        merges = linkage(self._distances(state, sites, ask), method)
        labels = fcluster(merges, self.k, "maxclust")
        member = named_alike(dict(zip(sites, map(int, labels), strict=True)), state.member)
        tree = tree_of(sites, merges)
        state = replace(state, leaves=tree.leaves, merges=tree.merges)
        if member == state.member:
            return state
        means = {g: self._mean(state, [s for s in sites if member[s] == g], ask) for g in sorted(set(member.values()))}
        weights, stats = ({g: m.weights for g, m in means.items()}, {g: m.stats for g, m in means.items()})
        first = min(means)  # whoever is not yet known begins there
        return replace(
            state, weights={FIRST: weights[first]} | weights, stats={FIRST: stats[first]} | stats, member=member
        )

    def _distances(self, state: State, sites: Sequence[SiteId], ask: Ask) -> Tensor:
        if self.by == "weights":
            return distances([state.latest[site] for site in sites])
        from pipeline.strategies._representation_similarity import pairwise

        features, inputs = activations(
            [Snapshot(state.latest[s], state.latest_stats[s]) for s in sites], ask, self.probe
        )
        return 1 - pairwise(features, inputs, "cka").mean(0)

    def _mean(self, state: State, sites: Sequence[SiteId], ask: Ask) -> Snapshot:
        """Of the last models of these sites, by the study's rule."""
        known = [
            Reply(
                s,
                "train",
                state.rounds,
                0,
                Update({"model": state.latest[s], "stats": state.latest_stats[s]}),
                state.shares[s],
            )
            for s in sites
        ]
        total = ask.combined(known)
        return Snapshot(total.mean("model"), total.mean("stats"))

    def tree(self, state: State) -> Tree | None:
        return Tree(state.leaves, state.merges) if state.merges else None


def sends_of(sends: Mapping[SiteId, Mapping[str, Vec]], state: State, reply: Reply) -> Vec:
    """What the site started from; a late answer's start is gone, its group's model is the nearest to it."""
    if reply.site in sends:
        return sends[reply.site]["weights"]
    return state.weights[state.member.get(reply.site, FIRST)]
