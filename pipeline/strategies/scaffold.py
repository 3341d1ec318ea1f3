"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1, option II): control variates take the drift out of local steps.

A site steps along grad F_k(w) - c_k + c. Afterwards c_k is what its gradients came to on the way: (w_t - w) / travel
without the correction, where travel is the sum of the learning rates of its steps. c is the plain mean of all c_k, so
sites count alike where it comes to rest, as in the paper, whatever `weighting` says. With correction = 0 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from pipeline.core.parameters import Snapshot, Spec, Vec
from pipeline.protocol.messages import Flow, Memory, Message, SiteId, Vectors
from pipeline.protocol.tasks import Fit, Pull, fitted
from pipeline.strategies.base import Ask, Global, Plan, Strategy, Training, moved, only_plain_sgd


@dataclass(frozen=True)
class State(Global):
    control: Vec


class Scaffold(Strategy):
    paper: ClassVar[str] = "Karimireddy et al. 2020, arXiv 1910.06378"
    state: ClassVar[type] = State
    own_sums: ClassVar[bool] = True
    holds: ClassVar[str] = "the model, the mean control variate"
    remembered: ClassVar[str] = "its control variate"
    name: Literal["scaffold"] = "scaffold"
    server_lr: float = Field(1.0, gt=0)
    correction: float = Field(1.0, ge=0, le=1)  # share of the correction that is applied

    def objections(self, local: Training, spec: Spec) -> Iterator[str]:
        yield from only_plain_sgd("scaffold", local)

    def start(self, start: Snapshot, plan: Plan) -> State:
        return State(start.weights, start.stats, torch.zeros_like(start.weights))

    def brief(self, state: State, site: SiteId) -> Vectors:
        return {"weights": state.weights, "stats": state.stats, "control": state.control}

    def round(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> State:
        total = ask.total({site: self.brief(state, site) for site in sites})
        weights = state.weights + self.server_lr * total.mean("delta")
        return State(weights, total.mean("stats"), state.control + total.sum("control") / plan.sites)

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w, stats, c = (message.vectors[key] for key in ("weights", "stats", "control"))
        c_k = memory.get("control", torch.zeros_like(w))
        pull = Pull(offset=self.correction * (c - c_k)) if self.correction else Pull()
        fit = yield from fitted(Fit(w, stats, steps=plan.steps, epochs=plan.epochs, pull=pull))
        update = moved(w, fit)
        if not fit.travel:  # no step was done: nothing was learnt about the gradient
            return replace(update, sum={**update.sum, "control": torch.zeros_like(w)}), memory
        fresh = (w - fit.weights) / fit.travel - self.correction * (c - c_k)
        return replace(update, sum={**update.sum, "control": fresh - c_k}), {"control": fresh}
