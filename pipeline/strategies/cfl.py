"""CFL (Sattler et al. 2020, Algorithm 1): one group, cut in two wherever its sites pull apart although the whole stands still.

A group is cut when |weighted mean of the moves| < eps1 and the longest move > eps2, both in units of the longest move of
the first round. The halves are those that are least alike (cosine of the moves; complete linkage as in the authors' code,
where the paper's bipartition is single linkage). They have to be two populations and not noise: the paper's separation
gap, the least cosine within a half minus the largest across, must exceed `gap`. Never cut, it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.core.parameters import Snapshot, Vec
from pipeline.protocol.messages import Reply, Sees, SiteId
from pipeline.strategies._clustered import FIRST, Grouping, Groups, linkage
from pipeline.strategies.base import Ask, Plan, Tree


@dataclass(frozen=True)
class State(Groups):
    moves: Mapping[SiteId, Vec] = field(default_factory=dict)  # everybody's last since their group was made
    shares: Mapping[SiteId, float] = field(default_factory=dict)  # what everybody's move weighs
    since: Mapping[str, int] = field(default_factory=dict)  # the turn in which a group was made, if by a cut
    unit: float = 0.0
    cuts: tuple[tuple[str, str], ...] = ()  # (the group that was cut, the new one)


class Cfl(Grouping):
    paper: ClassVar[str] = "Sattler et al. 2020, arXiv 1910.01991"
    state: ClassVar[type] = State
    holds: ClassVar[str] = "a model a group, who is in which, everybody's last move"
    name: Literal["cfl"] = "cfl"
    eps1: float = Field(0.4, ge=0)
    eps2: float = Field(0.2, ge=0)
    gap: float = Field(0.1, ge=-2, lt=2)
    smallest: int = Field(2, ge=1)  # sites of a group

    @property
    def sees(self) -> Sees:
        return "each"

    def start(self, start: Snapshot, plan: Plan) -> State:
        return State({FIRST: start.weights}, {FIRST: start.stats}, {})

    def round(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> State:
        replies = ask.each({site: self.brief(state, site) for site in sites})
        member = {**state.member} | {r.site: state.member.get(r.site, FIRST) for r in replies}
        fresh = [r for r in replies if r.turn > state.since.get(member[r.site], 0)]  # late ones may be of before a cut
        moves = {**state.moves} | {r.site: r.update.mean["delta"] for r in fresh}
        shares = {**state.shares} | {r.site: r.weight for r in fresh}
        unit = state.unit or max(float(move.norm()) for move in moves.values())
        state = replace(state, member=member, moves=moves, shares=shares, unit=unit)
        for group in state.weights:
            mine = [r for r in replies if member[r.site] == group]
            if mine:
                state = self._cut(self._step(state, group, mine, ask), group, max(r.turn for r in replies))
        return state

    def _step(self, state: State, group: str, replies: Sequence[Reply], ask: Ask) -> State:
        total = ask.combined(replies)
        weights = {**state.weights, group: state.weights[group] + total.mean("delta")}
        return replace(state, weights=weights, stats={**state.stats, group: total.mean("stats")})

    def _cut(self, state: State, group: str, turn: int) -> State:
        members = [site for site, g in state.member.items() if g == group]
        if len(members) < 2 * self.smallest or any(site not in state.moves for site in members):
            return state
        moves = torch.stack([state.moves[site] for site in members])
        share = torch.tensor([state.shares[site] for site in members])
        still = float(((share / share.sum()) @ moves).norm()) < self.eps1 * state.unit
        if not still or float(moves.norm(dim=1).max()) <= self.eps2 * state.unit:
            return state
        apart, cosine = halves(moves)
        small = min(int(apart.sum()), int((~apart).sum())) < self.smallest
        if small or separation(cosine, apart) <= self.gap:
            return state
        leaving = [site for site, goes in zip(members, apart.tolist(), strict=True) if goes]
        new = str(len(state.weights))
        return replace(
            state,
            weights={**state.weights, new: state.weights[group]},
            stats={**state.stats, new: state.stats[group]},
            member={**state.member} | dict.fromkeys(leaving, new),
            moves={site: move for site, move in state.moves.items() if site not in members},  # of the old group
            since={**state.since, group: turn, new: turn},
            cuts=(*state.cuts, (group, new)),
        )

    def tree(self, state: State) -> Tree | None:
        """The cuts, the first at the top."""
        return tree_of_cuts(state.member, state.cuts) if state.cuts else None


def halves(moves: Tensor) -> tuple[Tensor, Tensor]:
    """(S, P) -> who belongs to the half without the first site (S,), and the cosines (S, S)."""
    from scipy.cluster.hierarchy import to_tree

    unit = moves / moves.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosine = (unit @ unit.T).clamp(-1, 1)
    left = torch.zeros(len(moves), dtype=torch.bool)
    top = to_tree(linkage(1 - cosine, "complete")).get_left()
    left[top.pre_order() if top else []] = True  # two even where all are alike
    return left != left[0], cosine


def separation(cosine: Tensor, apart: Tensor) -> float:
    """The least similarity within a half minus the largest across (the paper's g)."""
    across = apart[:, None] != apart
    return float(cosine[~across].min() - cosine[across].max())


def tree_of_cuts(member: Mapping[SiteId, str], cuts: Sequence[tuple[str, str]]) -> Tree:
    """Members of a group meet at 0, groups at the height of the cut that parted them."""
    leaves = sorted(member, key=lambda site: (int(member[site]), site))
    merges: list[tuple[int, int, float, int]] = []
    node: dict[str, Any] = {}  # group -> (its node, its size)

    def join(a: tuple[int, int], b: tuple[int, int], height: float) -> tuple[int, int]:
        merges.append((a[0], b[0], height, a[1] + b[1]))
        return len(leaves) + len(merges) - 1, a[1] + b[1]

    for place, site in enumerate(leaves):
        group = member[site]
        node[group] = join(node[group], (place, 1), 0.0) if group in node else (place, 1)
    for height, (old, new) in enumerate(reversed(cuts), start=1):
        node[old] = join(node[old], node[new], float(height))
    return Tree(tuple(leaves), tuple(merges))
