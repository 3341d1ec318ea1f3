"""FedNova (Wang et al. 2020, section 4, plain local SGD): deltas are divided by their local steps before averaging.

    client k  d_k = (w_k - w_t) / tau_k
    server    w_{t+1} = w_t + tau_eff sum_k p_k d_k,  tau_eff = sum_k p_k tau_k

Clients with more steps do not pull the model towards their own optimum. tau_k is the sum of the learning rates of the
client's steps (the paper: their number, at one learning rate), p_k the client's weight. It has no settings; if all
clients take equally many steps it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch

from pipeline.core.parameters import ParameterSpec
from pipeline.protocol.messages import ClientState, ClientTask, Message, SiteId
from pipeline.protocol.tasks import TrainJob, run_training
from pipeline.strategies.base import (
    ClientRequests,
    GlobalModelState,
    LocalTrainingConfig,
    Strategy,
    StrategyContext,
    make_update,
    require_plain_sgd,
)


class FedNova(Strategy):
    description: ClassVar[str] = "like plain averaging, corrected for sites that do more steps than others"
    update_text: ClassVar[str] = "the mean direction of the site's steps, and how many they were"
    paper: ClassVar[str] = "Wang et al. 2020, arXiv 2007.07481"
    partial_updates: ClassVar[Literal["drop", "keep"]] = "keep"
    name: Literal["fednova"] = "fednova"

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        yield from require_plain_sgd("fednova", local)

    def run_round(
        self, state: GlobalModelState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> GlobalModelState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        tau_eff, mean_normalized_delta = aggregate.mean("travel"), aggregate.mean("pace")
        return GlobalModelState(state.weights + tau_eff * mean_normalized_delta, aggregate.mean("stats"))

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w, norm_stats = message.vectors["weights"], message.vectors["stats"]
        result = yield from run_training(TrainJob(w, norm_stats, steps=context.steps, epochs=context.epochs))
        tau = torch.tensor(result.lr_sum)
        normalized_delta = (result.weights - w) / tau.clamp(min=1e-30)  # without a step both are 0
        averaged = {"pace": normalized_delta, "travel": tau, "stats": result.norm_stats}
        return replace(make_update(w, result), averaged=averaged), client_state
