"""FedNova (Wang et al. 2020, plain local SGD): moves are averaged per unit of travel, so that who steps more does not pull more.

w <- w + (mean of travel_k) * (mean of delta_k / travel_k), where travel is the sum of the learning rates of a site's steps.
With equal steps everywhere it is FedAvg.
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
    paper: ClassVar[str] = "Wang et al. 2020, arXiv 2007.07481"
    partial_updates: ClassVar[Literal["drop", "keep"]] = "keep"
    name: Literal["fednova"] = "fednova"

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        yield from require_plain_sgd("fednova", local)

    def run_round(
        self, state: GlobalModelState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> GlobalModelState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        step = aggregate.mean("travel") * aggregate.mean("pace")
        return GlobalModelState(state.weights + step, aggregate.mean("stats"))

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w, norm_stats = message.vectors["weights"], message.vectors["stats"]
        result = yield from run_training(TrainJob(w, norm_stats, steps=context.steps, epochs=context.epochs))
        update, lr_sum = make_update(w, result), torch.tensor(result.lr_sum)
        normalized_delta = (result.weights - w) / lr_sum.clamp(min=1e-30)
        return replace(
            update, averaged={"pace": normalized_delta, "travel": lr_sum, "stats": result.norm_stats}
        ), client_state
