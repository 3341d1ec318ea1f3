"""FedSGD (McMahan et al. 2017, section 2): one gradient over all local data a round, one step from the mean of them."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from pipeline.messages import Flow, Memory, Message, Update
from pipeline.strategies.base import Plan, Strategy
from pipeline.work import Gradient, slope


class FedSgd(Strategy):
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    name: Literal["fedsgd"] = "fedsgd"

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w, stats = message.vectors["weights"], message.vectors["stats"]
        seen = yield from slope(Gradient(w, stats))
        # the step is linear in the gradient, so its mean is the step along the mean gradient
        delta = -plan.lr(message.turn) * seen.gradient
        loss = torch.tensor(seen.loss * seen.work.examples)
        return Update(mean={"delta": delta, "stats": stats}, sum={"train_loss": loss}, work=seen.work), memory
