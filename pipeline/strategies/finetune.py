"""Fine-tuning: FedAvg, after which every site trains the common model on for a while on its own examples.

The simplest personalisation, and a hard one to beat. With epochs = 0 it is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat

from pipeline.core.parameters import Snapshot
from pipeline.protocol.messages import Memory, Message
from pipeline.protocol.tasks import Fit, fitted
from pipeline.strategies.base import Plan, Strategy, Thought, sent


class FineTune(Strategy):
    paper: ClassVar[str] = "Wang et al. 2019, arXiv 1910.10252"
    personalised: ClassVar[bool] = True
    name: Literal["finetune"] = "finetune"
    epochs: NonNegativeInt = 1
    personal_lr: PositiveFloat | None = None  # else the round's

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        common = sent(message)
        if not self.epochs:
            return common
        fit = yield from fitted(Fit(common.weights, common.stats, epochs=self.epochs, lr=self.personal_lr))
        return Snapshot(fit.weights, fit.stats)
