"""Ditto (Li et al. 2021, Algorithm 1): beside the common model, which is FedAvg's, every site trains one of its own.

A site's own model v minimises F_k(v) + (lambda/2)|v - w|^2: with lambda = 0 it trains alone, with a large one it
follows the common model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from pipeline.protocol.messages import Flow, Memory, Message
from pipeline.protocol.tasks import Fit, fitted, toward
from pipeline.strategies.base import Plan, Strategy, Thought, moved, remembered


class Ditto(Strategy):
    paper: ClassVar[str] = "Li et al. 2021, arXiv 2012.04221"
    personalised: ClassVar[bool] = True
    remembers: ClassVar[bool] = True
    remembered: ClassVar[str] = "the site's own model"
    name: Literal["ditto"] = "ditto"
    lam: float = Field(0.1, ge=0)
    epochs: NonNegativeInt = 0  # for the own model; 0: as long as for the common one
    personal_lr: PositiveFloat | None = None  # of the own model; else the round's

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w, stats = message.vectors["weights"], message.vectors["stats"]
        common = yield from fitted(Fit(w, stats, steps=plan.steps, epochs=plan.epochs))
        v = remembered(memory, message)
        steps, epochs = (None, self.epochs) if self.epochs else (plan.steps, plan.epochs)
        job = Fit(v.weights, v.stats, steps=steps, epochs=epochs, pull=toward(w, self.lam), lr=self.personal_lr)
        own = yield from fitted(job)
        return moved(w, common, work=common.work + own.work), {"weights": own.weights, "stats": own.stats}

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        return remembered(memory, message)
        yield
