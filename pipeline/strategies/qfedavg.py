"""q-FedAvg (Li et al. 2020, Algorithm 2): clients with a large loss count more, the more the larger q is.

    client k  Delta_k = F_k^q delta_k
              h_k = q F_k^(q-1) |delta_k|^2 L + F_k^q
    server    w <- w + sum_k Delta_k / sum_k h_k

F_k is the loss of w at client k, delta_k the change of the weights by local training, and L = 1 / local learning rate
the paper's estimate of the gradient's Lipschitz constant; both terms are the paper's, divided by L. q = 0 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from pipeline.protocol.messages import ClientState, ClientTask, Message, SiteId
from pipeline.protocol.tasks import EvaluateJob, TrainJob, run_evaluation, run_training
from pipeline.strategies.base import ClientRequests, GlobalModelState, Strategy, StrategyContext, make_update

MIN_LOSS = 1e-10  # F_k^(q-1) is infinite at F_k = 0 if q < 1


class QFedAvg(Strategy):
    description: ClassVar[str] = "like plain averaging, but sites where the model performs badly count more"
    update_text: ClassVar[str] = (
        "the change of every weight, scaled by the training loss, and a number that depends on this loss and on the length of the change"
    )
    paper: ClassVar[str] = "Li et al. 2020, arXiv 1905.10497"
    name: Literal["qfedavg"] = "qfedavg"
    q: float = Field(0.1, ge=0)  # fairness: 0 is FedAvg, large values approach minimax fairness

    def run_round(
        self, state: GlobalModelState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> GlobalModelState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        step = aggregate.mean("delta") / aggregate.mean("bound")  # a quotient of means is a quotient of sums
        return GlobalModelState(state.weights + step, aggregate.mean("stats"))

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w, norm_stats = message.vectors["weights"], message.vectors["stats"]
        result = yield from run_training(TrainJob(w, norm_stats, steps=context.steps, epochs=context.epochs))
        update = make_update(w, result)
        if not self.q:
            return replace(update, averaged={**update.averaged, "bound": torch.tensor(1.0)}), client_state
        sums = yield from run_evaluation(EvaluateJob(w, "train", norm_stats))
        loss = max(float(sums.loss / sums.n), MIN_LOSS)
        delta, lr = update.averaged["delta"], context.lr_schedule(message.round)
        h = self.q * loss ** (self.q - 1) * float(delta.double().square().sum()) / lr + loss**self.q
        averaged = {**update.averaged, "delta": loss**self.q * delta, "bound": torch.tensor(h)}
        return replace(update, averaged=averaged), client_state
