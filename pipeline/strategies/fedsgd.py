"""FedSGD (McMahan et al. 2017, section 2): one full gradient per client and round, one step along their weighted mean.

    client k  g_k = grad F_k(w_t) over all local examples
    server    w_{t+1} = w_t - eta sum_k (n_k / n) g_k

It has no settings of its own; eta is `local.lr`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch

from pipeline.core.parameters import ParameterSpec
from pipeline.protocol.messages import ClientState, ClientTask, ClientUpdate, Message
from pipeline.protocol.tasks import GradientJob, run_gradient
from pipeline.strategies.base import LocalTrainingConfig, Strategy, StrategyContext


class FedSgd(Strategy):
    description: ClassVar[str] = (
        "every site sends the direction in which the global model should move, computed over all its images"
    )
    update_text: ClassVar[str] = "the gradient over all training images"
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    full_batch_only: ClassVar[bool] = True
    name: Literal["fedsgd"] = "fedsgd"

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        if spec.num_norm_stats:
            yield "fedsgd does not update BatchNorm statistics; set model.norm = 'group' or use fedavg"
        if local.optimizer != "sgd" or local.momentum or local.weight_decay:
            yield "fedsgd takes one plain step a round; set local.optimizer = 'sgd' without momentum and weight_decay"
        if (local.epochs, local.steps) != (1, None):
            yield "fedsgd takes one step a round; leave out local.epochs and local.steps, or use fedavg"

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w, norm_stats = message.vectors["weights"], message.vectors["stats"]
        result = yield from run_gradient(GradientJob(w, norm_stats))
        # the step is linear in the gradient: the mean of the clients' steps is the step along their mean gradient
        delta = -context.lr_schedule(message.round) * result.gradient
        loss = torch.tensor(result.loss * result.work.num_examples)
        update = ClientUpdate(
            averaged={"delta": delta, "stats": norm_stats}, summed={"train_loss": loss}, work=result.work
        )
        return update, client_state
