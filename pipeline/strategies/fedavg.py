"""FedAvg (McMahan et al. 2017, Algorithm 1): sites train, the coordinator adds the weighted mean of what moved."""

from __future__ import annotations

from typing import ClassVar, Literal

from pipeline.messages import Flow, Memory, Message
from pipeline.strategies.base import Plan, Strategy, moved
from pipeline.work import Fit, fitted


class FedAvg(Strategy):
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    name: Literal["fedavg"] = "fedavg"

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w = message.vectors["weights"]
        fit = yield from fitted(Fit(w, message.vectors["stats"], steps=plan.steps, epochs=plan.epochs))
        return moved(w, fit), memory
