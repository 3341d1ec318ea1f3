"""q-FedAvg (Li et al. 2020, Algorithm 2): sites on which the model does badly count more, the more the larger q is.

With F_k the loss of the round's model at site k and L = 1/lr:
w <- w + sum_k F_k^q delta_k / sum_k (q F_k^(q-1) |delta_k|^2 L + F_k^q). With q = 0 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from pipeline.protocol.messages import Flow, Memory, Message, SiteId
from pipeline.protocol.tasks import Evaluate, Fit, evaluated, fitted
from pipeline.strategies.base import Ask, Global, Plan, Strategy, moved

SMALLEST = 1e-10  # a loss of zero would have no power below one


class QFedAvg(Strategy):
    paper: ClassVar[str] = "Li et al. 2020, arXiv 1905.10497"
    name: Literal["qfedavg"] = "qfedavg"
    q: float = Field(0.1, ge=0)

    def round(self, state: Global, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Global:
        total = ask.total({site: self.brief(state, site) for site in sites})
        return Global(state.weights + total.mean("delta") / total.mean("bound"), total.mean("stats"))

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w, stats = message.vectors["weights"], message.vectors["stats"]
        fit = yield from fitted(Fit(w, stats, steps=plan.steps, epochs=plan.epochs))
        update = moved(w, fit)
        if not self.q:
            return replace(update, mean={**update.mean, "bound": torch.tensor(1.0)}), memory
        seen = yield from evaluated(Evaluate(w, "train", stats))
        loss = max(float(seen.loss / seen.n), SMALLEST)
        delta, rate = update.mean["delta"], plan.lr(message.turn)
        bound = self.q * loss ** (self.q - 1) * float(delta.double().square().sum()) / rate + loss**self.q
        return replace(
            update, mean={**update.mean, "delta": loss**self.q * delta, "bound": torch.tensor(bound)}
        ), memory
