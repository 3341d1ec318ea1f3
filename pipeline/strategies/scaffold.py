"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1, option II): control variates correct the drift of local steps.

    client k  y <- y - eta (grad F_k(y) - c_k + c), K times, from y = w
              c_k+ = c_k - c + (w - y) / (K eta)
    server    w <- w + server_lr mean of (y - w)
              c <- c + (1/N) sum_k (c_k+ - c_k)

K eta is the sum of the learning rates of the client's steps. c is the plain mean of all c_k: as in the paper, clients
count equally at convergence, whatever the study's `weighting`. With correction = 0 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from pipeline.core.parameters import ModelState, NamedTensors, ParameterSpec, ParamVector
from pipeline.protocol.messages import ClientState, ClientTask, Message, SiteId
from pipeline.protocol.tasks import LocalRegularizer, TrainJob, run_training
from pipeline.strategies.base import (
    ClientRequests,
    GlobalModelState,
    LocalTrainingConfig,
    Strategy,
    StrategyContext,
    make_update,
    require_plain_sgd,
)


@dataclass(frozen=True)
class ScaffoldState(GlobalModelState):
    control: ParamVector  # c


class Scaffold(Strategy):
    description: ClassVar[str] = "like plain averaging, with an additional correction for differences between sites"
    update_text: ClassVar[str] = "the change of every weight and of the site's control variate"
    paper: ClassVar[str] = "Karimireddy et al. 2020, arXiv 1910.06378"
    state_type: ClassVar[type] = ScaffoldState
    bypasses_aggregation_rule: ClassVar[bool] = True
    server_state_text: ClassVar[str] = "the model, the mean control variate"
    client_state_text: ClassVar[str] = "its control variate"
    name: Literal["scaffold"] = "scaffold"
    server_lr: float = Field(1.0, gt=0)  # the paper's global step size eta_g
    correction: float = Field(1.0, ge=0, le=1)  # share of c - c_k that is applied (ours); the paper has 1

    def incompatibilities(self, local: LocalTrainingConfig, spec: ParameterSpec) -> Iterator[str]:
        yield from require_plain_sgd("scaffold", local)

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> ScaffoldState:
        return ScaffoldState(initial_model.weights, initial_model.norm_stats, torch.zeros_like(initial_model.weights))

    def train_payload(self, state: ScaffoldState, site: SiteId) -> NamedTensors:
        return {"weights": state.weights, "stats": state.norm_stats, "control": state.control}

    def run_round(
        self, state: ScaffoldState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> ScaffoldState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        w = state.weights + self.server_lr * aggregate.mean("delta")
        c = state.control + aggregate.sum("control") / context.num_sites
        return ScaffoldState(w, aggregate.mean("stats"), c)

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        w, norm_stats, c = (message.vectors[key] for key in ("weights", "stats", "control"))
        c_k = client_state.get("control", torch.zeros_like(w))
        regularizer = LocalRegularizer(offset=self.correction * (c - c_k)) if self.correction else LocalRegularizer()
        result = yield from run_training(
            TrainJob(w, norm_stats, steps=context.steps, epochs=context.epochs, regularizer=regularizer)
        )
        update = make_update(w, result)
        if not result.lr_sum:  # without a step there is no new estimate of the gradient
            return replace(update, summed={**update.summed, "control": torch.zeros_like(w)}), client_state
        new_c_k = (w - result.weights) / result.lr_sum - self.correction * (c - c_k)
        return replace(update, summed={**update.summed, "control": new_c_k - c_k}), {"control": new_c_k}
