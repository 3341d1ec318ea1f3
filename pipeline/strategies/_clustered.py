"""What clustered algorithms have in common: a model a group, and who is in which group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from pipeline.core.parameters import Snapshot, Vec
from pipeline.protocol.messages import SiteId, Vectors
from pipeline.strategies.base import Plan, Strategy, Tree

FIRST = "0"


@dataclass(frozen=True)
class Groups:
    """The state: models by group, and everybody's group. Who was never heard of is in the first."""

    weights: Mapping[str, Vec]
    stats: Mapping[str, Vec]
    member: Mapping[SiteId, str]


class Grouping(Strategy):
    holds: ClassVar[str] = "a model a group, who is in which"

    def start(self, start: Snapshot, plan: Plan) -> Any:
        return Groups({FIRST: start.weights}, {FIRST: start.stats}, {})

    def brief(self, state: Any, site: SiteId) -> Vectors:
        group = state.member.get(site, FIRST)
        return {"weights": state.weights[group], "stats": state.stats[group]}

    def models(self, state: Any) -> Mapping[str, Snapshot]:
        return {f"group/{g}": Snapshot(w, state.stats[g]) for g, w in state.weights.items()}

    def groups(self, state: Any) -> Mapping[SiteId, str]:
        found: Mapping[SiteId, str] = state.member
        return found

    def candidates(self, state: Any) -> Mapping[str, Snapshot]:
        return {g: Snapshot(w, state.stats[g]) for g, w in state.weights.items()}

    def place(self, state: Any, site: SiteId, group: str) -> Any:
        return replace(state, member={**state.member, site: group})


def distances(vectors: Sequence[Vec]) -> Tensor:
    """(S, S), Euclidean. Of more than 25 vectors torch takes |a|^2 + |b|^2 - 2ab: in float32 nothing is left of models
    that differ little, so what they have in common goes first."""
    flat = torch.stack(list(vectors))
    apart = (flat - flat.mean(0)).double()
    return torch.cdist(apart, apart)


def linkage(distances: Tensor, method: Literal["complete", "average", "centroid", "ward"]) -> np.ndarray:
    """(S, S) -> scipy's merges (S - 1, 4)."""
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    apart = distances.double().numpy()
    apart = np.maximum((apart + apart.T) / 2, 0.0)
    np.fill_diagonal(apart, 0.0)
    merges: np.ndarray = hierarchy.linkage(squareform(apart, checks=False), method)
    return merges


def tree_of(sites: Sequence[SiteId], merges: np.ndarray) -> Tree:
    return Tree(tuple(sites), tuple((int(a), int(b), float(h), int(n)) for a, b, h, n in merges))


def named_alike(labels: Mapping[SiteId, int], before: Mapping[SiteId, str]) -> dict[SiteId, str]:
    """New clusters under the names of the old ones that they share most sites with, so that a move is a move."""
    from scipy.optimize import linear_sum_assignment

    new, old = sorted(set(labels.values())), sorted(set(before.values()))
    shared = np.array([[sum(labels[s] == a and before.get(s) == b for s in labels) for b in old] for a in new])
    names: dict[int, str] = {}
    if old:
        rows, columns = linear_sum_assignment(-shared)
        names = {new[r]: old[c] for r, c in zip(rows, columns, strict=True) if shared[r, c]}
    free = (str(n) for n in range(len(new) + len(old)) if str(n) not in names.values())
    names |= {label: next(free) for label in new if label not in names}
    return {site: names[label] for site, label in labels.items()}
