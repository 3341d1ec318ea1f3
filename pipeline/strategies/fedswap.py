"""FedSwap: between two averages sites swap models, so that each model sees several sites' data before it is averaged.

A round is h1 steps. Every h2-th round is a weighted average that goes to all; after every other round models change places:
at random, or with the site whose model is least similar. With h2 = 1 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from pipeline.core.errors import Refused
from pipeline.core.parameters import Snapshot, Spec, Vec
from pipeline.protocol.messages import Flow, Memory, Message, Reply, Sees, SiteId, Total, Update, Vectors
from pipeline.protocol.tasks import Fit, fitted
from pipeline.strategies._activations import activations, layers_of, same_layers
from pipeline.strategies.base import Ask, Global, Plan, Strategy, Training, moved

SALT = 0x5A4B
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class State(Global):
    """`weights` is the last average; a site's model is that plus its move."""

    moves: Mapping[SiteId, Vec] = field(default_factory=dict)
    site_stats: Mapping[SiteId, Vec] = field(default_factory=dict)
    shares: Mapping[SiteId, float] = field(default_factory=dict)  # what a site weighs in the average
    rounds: int = 0


class FedSwap(Strategy):
    paper: ClassVar[str] = "Chiu et al. 2020, IEEE Internet of Things Journal 7(10) (random swap)"
    state: ClassVar[type] = State
    holds: ClassVar[str] = "the last average, how far everybody's model is from it"
    name: Literal["fedswap"] = "fedswap"
    h1: PositiveInt | None = None  # steps a round; None: the study's local work
    h2: PositiveInt = 5  # rounds from average to average
    swap: Literal["random", "pairs", "cka", "dcka", "debiased_cka", "cca", "hsic", "sumdiff"] = "random"
    kernel: Literal["linear", "polynomial", "gaussian"] = "linear"
    matching: Literal["greedy", "optimal"] = "greedy"
    layers: bool = False  # every layer finds its own partner
    probe: int = Field(256, ge=4)  # public examples that networks are compared on

    @property
    def sees(self) -> Sees:
        return "each"

    @property
    def probes(self) -> bool:
        return self.h2 > 1 and self.swap not in ("random", "pairs", "sumdiff")

    def objections(self, local: Training, spec: Spec) -> Iterator[str]:
        if self.layers and spec.stat_size:
            yield "fedswap cannot swap BatchNorm's statistics layer by layer; set model.norm = 'group' or strategy.layers = false"

    def start(self, start: Snapshot, plan: Plan) -> State:
        return State(start.weights, start.stats)

    def brief(self, state: State, site: SiteId) -> Vectors:
        move = state.moves.get(site)
        weights = state.weights if move is None else state.weights + move
        return {"weights": weights, "stats": state.site_stats.get(site, state.stats)}

    def round(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> State:
        replies = ask.each({site: self.brief(state, site) for site in sites})
        moves = {**state.moves}
        for reply in replies:
            delta = reply.update.mean["delta"]
            moves[reply.site] = moves[reply.site] + delta if reply.site in moves else delta
        state = replace(
            state,
            moves=moves,
            site_stats={**state.site_stats} | {r.site: r.update.mean["stats"] for r in replies},
            shares={**state.shares} | {r.site: r.weight for r in replies},
            rounds=state.rounds + 1,
        )
        if state.rounds % self.h2 == 0:
            total = ask.combined(holders(state))
            return State(state.weights + total.mean("move"), total.mean("stats"), rounds=state.rounds)
        return self._swapped(state, ask, plan)

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w = message.vectors["weights"]
        steps, epochs = (self.h1, None) if self.h1 else (plan.steps, plan.epochs)
        fit = yield from fitted(Fit(w, message.vectors["stats"], steps=steps, epochs=epochs))
        return moved(w, fit), memory

    def models(self, state: State) -> Mapping[str, Snapshot]:
        """The average, as it would be if it were taken now."""
        if not state.moves:
            return {"global": Snapshot(state.weights, state.stats)}
        total = Total.of(holders(state))
        return {"global": Snapshot(state.weights + total.mean("move"), total.mean("stats"))}

    def _swapped(self, state: State, ask: Ask, plan: Plan) -> State:
        sites = tuple(state.moves)
        if len(sites) < 2:
            return state
        dice = np.random.default_rng([plan.seed, SALT, state.rounds])
        flat = torch.stack([state.moves[site] for site in sites])  # (S, P)
        if self.swap in ("random", "pairs"):
            order = drawn(len(sites), dice, self.swap == "pairs")
            columns = [(slice(None), order)]
        else:
            columns = self._by_likeness(state, sites, ask, plan)
        after = flat.clone()
        for place, order in columns:
            after[:, place] = flat[order][:, place]
        stats = [state.site_stats[site] for site in sites]
        whole = columns[0][1] if len(columns) == 1 else list(range(len(sites)))  # statistics go with a whole model
        return replace(
            state,
            moves=dict(zip(sites, after, strict=True)),
            site_stats={site: stats[n] for site, n in zip(sites, whole, strict=True)},
        )

    def _by_likeness(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> list[tuple[Any, list[int]]]:
        """(columns of the weights, whose go where) for the model as a whole, or for every layer."""
        from pipeline.strategies._pairing import MATCHINGS

        groups = layers_of(plan.spec)
        alike = self._likeness(state, sites, groups, ask, plan)  # (L, S, S)
        pair = MATCHINGS[self.matching]
        if not self.layers:
            return [(slice(None), exchanged(len(sites), pair(alike.mean(0))))]
        same_layers(groups, list(alike), self.name)
        owner = torch.cat([torch.full((n,), i) for i, n in enumerate(plan.spec.sizes)])
        return [
            (torch.isin(owner, torch.tensor(group)), exchanged(len(sites), pair(matrix)))
            for group, matrix in zip(groups, alike, strict=True)
        ]

    def _likeness(self, state: State, sites: Sequence[SiteId], groups: list[list[int]], ask: Ask, plan: Plan) -> Tensor:
        from pipeline.strategies._representation_similarity import pairwise, weight_similarity

        models = [Snapshot(state.weights + state.moves[site], state.site_stats[site]) for site in sites]
        if self.swap == "sumdiff":
            parts = [plan.spec.split(model.weights) for model in models]
            return weight_similarity([[torch.cat([p[i].flatten() for i in g]) for g in groups] for p in parts])
        features, inputs = activations(models, ask, self.probe)
        widest = max(layer.shape[1] for layer in features[0])
        if self.swap == "cca" and widest >= len(inputs) - 1:
            raise Refused(
                f"cca calls any two layers alike unless there are more probes than features: {len(inputs)} public "
                f"examples, {widest} features; raise strategy.probe and public.share, or use cka"
            )
        return pairwise(features, inputs, self.swap, self.kernel)


def holders(state: State) -> list[Reply]:
    """Everybody's move since the last average, as an answer that can be combined."""
    return [
        Reply(s, "train", state.rounds, 0, Update({"move": move, "stats": state.site_stats[s]}), state.shares[s])
        for s, move in state.moves.items()
    ]


def drawn(count: int, dice: np.random.Generator, pairs: bool) -> list[int]:
    """Whose model goes where. `pairs`: disjoint ones; else everybody in turn swaps with anybody, as the algorithm has it."""
    if pairs:
        shuffled = [int(i) for i in dice.permutation(count)]
        return exchanged(count, list(zip(shuffled[::2], shuffled[1::2], strict=False)))
    order = list(range(count))
    for k in range(count):
        r = int(dice.integers(count))
        order[k], order[r] = order[r], order[k]
    return order


def exchanged(count: int, pairs: Pairs) -> list[int]:
    order = list(range(count))
    for a, b in pairs:
        order[a], order[b] = b, a
    return order
