"""Per-FedAvg (Fallah et al. 2020, Algorithm 1, first order): a common start from which a few local steps lead far.

Every local step takes its gradient a step of rate alpha ahead, on other examples. A site's own model is the
common one after `adapt` steps of rate alpha. With alpha = 0 the common model is FedAvg's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from pipeline.core.parameters import Snapshot
from pipeline.protocol.messages import Flow, Memory, Message
from pipeline.protocol.tasks import Fit, fitted
from pipeline.strategies.base import Plan, Strategy, Thought, moved, sent


class PerFedAvg(Strategy):
    paper: ClassVar[str] = "Fallah et al. 2020, arXiv 2002.07948"
    personalised: ClassVar[bool] = True
    name: Literal["perfedavg"] = "perfedavg"
    alpha: float = Field(0.01, ge=0)
    adapt: NonNegativeInt = 10  # steps that make a site's own model

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w = message.vectors["weights"]
        job = Fit(w, message.vectors["stats"], steps=plan.steps, epochs=plan.epochs, ahead=self.alpha)
        fit = yield from fitted(job)
        return moved(w, fit), memory

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        common = sent(message)
        if not (self.alpha and self.adapt):
            return common
        fit = yield from fitted(Fit(common.weights, common.stats, steps=self.adapt, lr=self.alpha))
        return Snapshot(fit.weights, fit.stats)
