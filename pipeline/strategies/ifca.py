"""IFCA (Ghosh et al. 2020, Algorithm 1, model averaging): k models; each site trains the one that fits its data best.

Sites choose by their training loss, so the coordinator needs the sum of each group's answers and no more. The models must
differ at the start: all but the first are drawn anew, with the spread that each tensor of the first has. With k = 1 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from pipeline.messages import Flow, Memory, Message, Sees, SiteId, Vectors
from pipeline.seeds import generator
from pipeline.strategies.base import Ask, Plan, Thought, moved
from pipeline.strategies.grouped import Grouping, Groups
from pipeline.weights import Snapshot, Spec, Vec
from pipeline.work import Evaluate, Fit, Job, Result, evaluated, fitted


class Ifca(Grouping):
    paper: ClassVar[str] = "Ghosh et al. 2020, arXiv 2006.04088"
    state: ClassVar[type] = Groups
    name: Literal["ifca"] = "ifca"
    k: PositiveInt = 2

    @property
    def sees(self) -> Sees:
        return "groups" if self.k > 1 else "totals"

    def start(self, start: Snapshot, plan: Plan) -> Groups:
        weights = {str(g): redrawn(start.weights, plan, g) if g else start.weights for g in range(self.k)}
        return Groups(weights, dict.fromkeys(weights, start.stats), {})

    def brief(self, state: Groups, site: SiteId) -> Vectors:
        return {
            f"{part}/{g}": values[g]
            for part, values in (("weights", state.weights), ("stats", state.stats))
            for g in values
        }

    def round(self, state: Groups, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Groups:
        sends = {site: self.brief(state, site) for site in sites}
        totals = ask.groups(sends, self.k) if self.k > 1 else {0: ask.total(sends)}
        weights = {**state.weights} | {str(g): state.weights[str(g)] + t.mean("delta") for g, t in totals.items()}
        stats = {**state.stats} | {str(g): t.mean("stats") for g, t in totals.items()}
        return Groups(weights, stats, {**state.member} | {s: str(g) for g, t in totals.items() for s in t.sites})

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
        for g in range(self.k if self.k > 1 else 0):
            seen = yield from evaluated(
                Evaluate(message.vectors[f"weights/{g}"], "train", message.vectors[f"stats/{g}"])
            )
            losses.append(float(seen.loss))
        return losses.index(min(losses)) if losses else 0


def redrawn(weights: Vec, plan: Plan, which: int) -> Vec:
    """Other weights of the same spread, tensor by tensor; biases and normalisations stay."""
    spec: Spec = plan.spec
    dice = generator(plan.seed, "ifca", which)
    parts = [
        (torch.randn(part.shape, generator=dice) * part.std() if part.dim() > 1 else part).flatten()
        for part in spec.split(weights)
    ]
    return torch.cat(parts)
