"""DemLearn (self-organised democratised learning): a hierarchy of groups that forms itself, from sites up to one top model.

Every tau rounds sites are clustered bottom-up by the distance of their models; the top `levels` of the tree are kept.
Bottom-up, a group's model is the mean of its members', each counting by its sites, times `amplify` at the lowest level in
the first rounds. Top-down, it is mixed with its parent's: alpha * parent + (1 - alpha) * own. A site starts from its lowest
group's model and is pulled towards it (mu). With levels = 1, amplify = 1 and mu = 0 it is FedAvg with equal weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from pipeline.core.parameters import Snapshot, Vec
from pipeline.protocol.messages import Flow, Memory, Message, Reply, Sees, SiteId, Vectors
from pipeline.protocol.tasks import Fit, Pull, fitted
from pipeline.strategies._clustered import FIRST, Grouping, Groups, distances, linkage, tree_of
from pipeline.strategies.base import Ask, Plan, Tree, moved, sent

Path = str  # of a group: "0" is the top, "0.1" its second child


@dataclass(frozen=True)
class State(Groups):
    """Groups are named by their path; `member` is everybody's lowest one."""

    latest: Mapping[SiteId, Vec] = field(default_factory=dict)  # everybody's last model
    latest_stats: Mapping[SiteId, Vec] = field(default_factory=dict)
    moves: Mapping[SiteId, Vec] = field(default_factory=dict)
    rounds: int = 0
    due: int = 1  # the round of the next clustering
    interval: float = 1.0
    leaves: tuple[SiteId, ...] = ()
    merges: tuple[tuple[int, int, float, int], ...] = ()


class DemLearn(Grouping):
    paper: ClassVar[str] = "Nguyen et al. 2022, arXiv 2007.03278"
    state: ClassVar[type] = State
    personalised: ClassVar[bool] = True
    partial: ClassVar[Literal["drop", "keep"]] = "keep"
    own_sums: ClassVar[bool] = True
    holds: ClassVar[str] = "the tree of groups, a model each, everybody's last model"
    name: Literal["demlearn"] = "demlearn"
    levels: PositiveInt = 3
    alpha: float = Field(0.5, ge=0, le=1)
    alpha_decay: float = Field(1.0, gt=0, le=1)  # a round: groups grow apart, specialisation gains
    mu: float = Field(0.001, ge=0)
    mu_decay: float = Field(1.0, gt=0, le=1)
    pull: Literal["group", "all"] = "group"  # all: towards every group above, each by 1 / its size
    tau: PositiveInt = 1  # rounds between clusterings ...
    tau_growth: float = Field(1.0, ge=1)  # ... which may grow: from plastic to stable
    amplify: float = Field(1.15, gt=0)
    amplified: NonNegativeInt = 5  # rounds
    linkage: Literal["centroid", "average", "ward"] = "centroid"  # ward (ours): groups of like size
    by: Literal["weights", "moves"] = "weights"

    @property
    def sees(self) -> Sees:
        return "each"

    def start(self, start: Snapshot, plan: Plan) -> State:
        return State({FIRST: start.weights}, {FIRST: start.stats}, {}, interval=float(self.tau))

    def round(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> State:
        replies = ask.each({site: self.brief(state, site) for site in sites})
        moves = {r.site: r.update.mean["delta"] for r in replies}
        state = replace(
            state,
            member={**state.member} | {r.site: state.member.get(r.site, FIRST) for r in replies},
            latest={**state.latest} | {s: self.brief(state, s)["weights"] + move for s, move in moves.items()},
            latest_stats={**state.latest_stats} | {r.site: r.update.mean["stats"] for r in replies},
            moves={**state.moves} | moves if self.by == "moves" else {},
            rounds=state.rounds + 1,
        )
        if state.rounds >= state.due:
            state = self._clustered(state)
        return self._mixed(state)

    def _clustered(self, state: State) -> State:
        """The tree of all sites that were heard of, cut below its top levels."""
        sites = tuple(state.latest)
        interval = state.interval * self.tau_growth
        state = replace(state, due=state.rounds + max(1, round(state.interval)), interval=interval)
        if len(sites) < 2 or self.levels == 1:
            return replace(state, member=dict.fromkeys(sites, FIRST))
        seen = state.latest if self.by == "weights" else state.moves
        merges = linkage(distances([seen[site] for site in sites]), self.linkage)
        tree = tree_of(sites, merges)
        return replace(state, member=cut(sites, merges, self.levels), leaves=tree.leaves, merges=tree.merges)

    def _mixed(self, state: State) -> State:
        weights: dict[Path, Vec] = {}
        stats: dict[Path, Vec] = {}
        louder = self.amplify if state.rounds <= self.amplified else 1.0
        sizes = sizes_of(state.member)
        for path in sorted(sizes, key=lambda p: -p.count(".")):  # bottom-up
            mine = [site for site, group in state.member.items() if group == path]
            below = [p for p in sizes if p.rpartition(".")[0] == path]
            parts = [(state.latest[s] * louder, state.latest_stats[s], 1) for s in mine]
            parts += [(weights[p], stats[p], sizes[p]) for p in below]
            weights[path] = sum_of([w * n for w, _, n in parts]) / sizes[path]
            stats[path] = sum_of([v * n for _, v, n in parts]) / sizes[path]
        alpha = self.alpha * self.alpha_decay ** (state.rounds - 1)
        for path in sorted(sizes, key=lambda p: p.count(".")):  # top-down
            if above := path.rpartition(".")[0]:
                weights[path] = alpha * weights[above] + (1 - alpha) * weights[path]
        return replace(state, weights=weights, stats=stats)

    def brief(self, state: State, site: SiteId) -> Vectors:
        group = state.member.get(site, FIRST)
        vectors = {"weights": state.weights[group], "stats": state.stats[group]}
        if self.pull == "group":
            return vectors
        sizes = sizes_of(state.member) or {FIRST: 1}
        above = [(state.weights[path], 1 / sizes[path]) for path in lineage(group)]
        return vectors | {
            "anchor": sum_of([w * by for w, by in above]),
            "slope": torch.tensor(sum(by for _, by in above)),
        }

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w = message.vectors["weights"]
        mu = self.mu * self.mu_decay ** (message.turn - 1)
        slope, anchor = (
            (float(message.vectors["slope"]), message.vectors["anchor"]) if "anchor" in message.vectors else (1.0, w)
        )
        pull = Pull(mu * slope, -mu * anchor) if mu else Pull()
        fit = yield from fitted(Fit(w, message.vectors["stats"], steps=plan.steps, epochs=plan.epochs, pull=pull))
        return moved(w, fit), memory

    def exam(self, state: State, site: SiteId) -> Vectors:
        """The site's own model, its group's and the top one."""
        group = state.member.get(site, FIRST)
        own = (state.latest.get(site, state.weights[group]), state.latest_stats.get(site, state.stats[group]))
        found = {"": own} | {
            f"{name}/": (state.weights[g], state.stats[g]) for name, g in (("group", group), ("global", FIRST))
        }
        return {
            f"{name}{part}": v
            for name, pair in found.items()
            for part, v in zip(("weights", "stats"), pair, strict=True)
        }

    def views(self, message: Message) -> Mapping[str, Snapshot]:
        if "global/weights" not in message.vectors:
            return {"global": sent(message)}
        return {
            n: Snapshot(message.vectors[f"{n}/weights"], message.vectors[f"{n}/stats"]) for n in ("group", "global")
        }

    def models(self, state: State) -> Mapping[str, Snapshot]:
        own = {f"site/{site}": Snapshot(w, state.latest_stats[site]) for site, w in state.latest.items()}
        groups = {f"group/{p}": Snapshot(w, state.stats[p]) for p, w in state.weights.items() if p != FIRST}
        return {"global": Snapshot(state.weights[FIRST], state.stats[FIRST])} | groups | own

    def candidates(self, state: State) -> Mapping[str, Snapshot]:
        lowest = set(state.member.values()) or {FIRST}
        return {p: Snapshot(state.weights[p], state.stats[p]) for p in sorted(lowest)}

    def welcome(self, state: State, reply: Reply) -> State:
        model = self.brief(state, reply.site)["weights"] + reply.update.mean["delta"]
        stats = {**state.latest_stats, reply.site: reply.update.mean["stats"]}
        return replace(state, latest={**state.latest, reply.site: model}, latest_stats=stats)

    def tree(self, state: State) -> Tree | None:
        return Tree(state.leaves, state.merges) if state.merges else None


def cut(sites: Sequence[SiteId], merges: np.ndarray, levels: int) -> dict[SiteId, Path]:
    """Everybody's group `levels` deep; of two children the one that holds the earlier site is the first."""
    from scipy.cluster.hierarchy import ClusterNode, to_tree

    member: dict[SiteId, Path] = {}

    def descend(node: ClusterNode, path: Path, depth: int) -> None:
        if depth == levels or node.is_leaf():
            member.update(dict.fromkeys((sites[leaf] for leaf in node.pre_order()), path))
            return
        children: list[Any] = sorted((node.get_left(), node.get_right()), key=lambda child: min(child.pre_order()))
        for place, child in enumerate(children):
            descend(child, f"{path}.{place}", depth + 1)

    descend(to_tree(merges), FIRST, 1)
    return {site: member[site] for site in sites}


def lineage(path: Path) -> list[Path]:
    """The group and all above it."""
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]


def sizes_of(member: Mapping[SiteId, Path]) -> dict[Path, int]:
    """Sites in every group, those of the groups below it included."""
    sizes: dict[Path, int] = {}
    for path in member.values():
        for above in lineage(path):
            sizes[above] = sizes.get(above, 0) + 1
    return sizes


def sum_of(vectors: Sequence[Vec]) -> Vec:
    return torch.stack(list(vectors)).sum(0)
