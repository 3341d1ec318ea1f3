"""FedSGD (McMahan et al. 2017, section 2): one gradient over all local data a round, one step from the mean of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch

from pipeline.core.parameters import Spec
from pipeline.protocol.messages import Flow, Memory, Message, Update
from pipeline.protocol.tasks import Gradient, slope
from pipeline.strategies.base import Plan, Strategy, Training


class FedSgd(Strategy):
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    whole: ClassVar[bool] = True
    name: Literal["fedsgd"] = "fedsgd"

    def objections(self, local: Training, spec: Spec) -> Iterator[str]:
        if spec.stat_size:
            yield "fedsgd moves no BatchNorm statistics; set model.norm = 'group' or use fedavg"
        if local.optimiser != "sgd" or local.momentum or local.weight_decay:
            yield "fedsgd takes one plain step a round; set local.optimiser = 'sgd' without momentum and weight_decay"
        if (local.epochs, local.steps) != (1, None):
            yield "fedsgd takes one step a round; leave out local.epochs and local.steps, or use fedavg"

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w, stats = message.vectors["weights"], message.vectors["stats"]
        seen = yield from slope(Gradient(w, stats))
        # the step is linear in the gradient, so its mean is the step along the mean gradient
        delta = -plan.lr(message.turn) * seen.gradient
        loss = torch.tensor(seen.loss * seen.work.examples)
        return Update(mean={"delta": delta, "stats": stats}, sum={"train_loss": loss}, work=seen.work), memory
