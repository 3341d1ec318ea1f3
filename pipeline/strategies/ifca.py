"""IFCA (Ghosh et al. 2020, Algorithm 1, model averaging): k models; each site trains the one that fits its data best.

Sites choose by their training loss, so the coordinator needs the sum of each group's answers and no more. The models must
differ at the start: all but the first are drawn anew, with the spread of each of its tensors. If one of them happens to
suit everybody, all sites stay with it; `warmup` rounds of one common model, parted by a little noise, are a surer start (ours):
where the common model stands still the populations pull apart. With k = 1 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pipeline.core.parameters import Snapshot, Vec
from pipeline.core.seeding import generator
from pipeline.protocol.messages import Flow, Memory, Message, Sees, SiteId, Vectors
from pipeline.protocol.tasks import Evaluate, Fit, Job, Result, evaluated, fitted
from pipeline.strategies._clustered import FIRST, Grouping, Groups
from pipeline.strategies.base import Ask, Plan, Thought, moved


@dataclass(frozen=True)
class State(Groups):
    rounds: int = 0


class Ifca(Grouping):
    paper: ClassVar[str] = "Ghosh et al. 2020, arXiv 2006.04088"
    state: ClassVar[type] = State
    name: Literal["ifca"] = "ifca"
    k: PositiveInt = 2
    warmup: NonNegativeInt = 0
    spread: PositiveFloat = 0.1  # of the noise that parts the models after the warm-up, in spreads of each tensor

    @property
    def sees(self) -> Sees:
        return "groups" if self.k > 1 else "totals"

    def start(self, start: Snapshot, plan: Plan) -> State:
        count = 1 if self.warmup else self.k
        weights = {str(g): noise(start.weights, plan, g) if g else start.weights for g in range(count)}
        return State(weights, dict.fromkeys(weights, start.stats), {})

    def brief(self, state: State, site: SiteId) -> Vectors:
        return {
            f"{part}/{g}": values[g]
            for part, values in (("weights", state.weights), ("stats", state.stats))
            for g in values
        }

    def round(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> State:
        sends = {site: self.brief(state, site) for site in sites}
        totals = ask.groups(sends, len(state.weights)) if len(state.weights) > 1 else {0: ask.total(sends)}
        weights = {**state.weights} | {str(g): state.weights[str(g)] + t.mean("delta") for g, t in totals.items()}
        stats = {**state.stats} | {str(g): t.mean("stats") for g, t in totals.items()}
        member = {**state.member} | {s: str(g) for g, t in totals.items() for s in t.sites}
        state = State(weights, stats, member, state.rounds + 1)
        return self._parted(state, plan) if self.k > 1 and state.rounds == self.warmup else state

    def _parted(self, state: State, plan: Plan) -> State:
        """k copies of the common model, each a little aside of it; all of them together are still its mean."""
        w = state.weights[FIRST]
        aside = torch.stack([noise(w, plan, g, biases=0.0) for g in range(self.k)])
        apart = w + self.spread * (aside - aside.mean(0))
        names = [str(g) for g in range(self.k)]
        return replace(
            state, weights=dict(zip(names, apart, strict=True)), stats=dict.fromkeys(names, state.stats[FIRST])
        )

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        group = yield from self._choice(message)
        w, stats = message.vectors[f"weights/{group}"], message.vectors[f"stats/{group}"]
        fit = yield from fitted(Fit(w, stats, steps=plan.steps, epochs=plan.epochs))
        return replace(moved(w, fit), group=group), memory

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        group = yield from self._choice(message)
        return Snapshot(message.vectors[f"weights/{group}"], message.vectors[f"stats/{group}"])

    def _choice(self, message: Message) -> Generator[Job, Result, int]:
        """The model with the least training loss."""
        losses = []
        count = sum(key.startswith("weights/") for key in message.vectors)
        for g in range(count if count > 1 else 0):
            seen = yield from evaluated(
                Evaluate(message.vectors[f"weights/{g}"], "train", message.vectors[f"stats/{g}"])
            )
            losses.append(float(seen.loss))
        return losses.index(min(losses)) if losses else 0


def noise(weights: Vec, plan: Plan, which: int, biases: float = 1.0) -> Vec:
    """Random weights with the spread of each tensor; vectors, which are biases and normalisations, times `biases`."""
    dice = generator(plan.seed, "ifca", which)
    parts = [
        (
            torch.randn(part.shape, generator=dice) * part.std(correction=0) if part.dim() > 1 else biases * part
        ).flatten()
        for part in plan.spec.split(weights)
    ]
    return torch.cat(parts)
