"""FedDyn (Acar et al. 2021, Algorithm 1): a linear term at each site, so that all sites agree at the global optimum.

    client k  w_k = argmin F_k(w) - <g_k, w> + (alpha/2) |w - w_t|^2,  then  g_k <- g_k - alpha (w_k - w_t)
    server    h <- h - (alpha/N) sum over the clients of the round (w_k - w_t),  then  w_t+1 = mean of w_k - h/alpha

The coordinator keeps h/alpha as `correction`. The paper's mean is plain: set `weighting = "equal"` in the study. With
alpha = 0 it is FedAvg. arXiv 2111.04263
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from hemofed import strategies as fl


@dataclass(frozen=True)
class FedDynState(fl.GlobalModelState):
    correction: fl.ParamVector  # h / alpha


class FedDyn(fl.Strategy):
    paper: ClassVar[str] = "Acar et al. 2021"
    state_type: ClassVar[type] = FedDynState
    server_state_text: ClassVar[str] = "the model and a correction"
    client_state_text: ClassVar[str] = "its linear term"
    name: Literal["feddyn"] = "feddyn"
    alpha: float = Field(0.01, ge=0)

    def init_state(self, initial_model: fl.ModelState, context: fl.StrategyContext) -> FedDynState:
        w = initial_model.weights
        return FedDynState(w, initial_model.norm_stats, torch.zeros_like(w))

    def run_round(
        self, state: FedDynState, clients: Sequence[fl.SiteId], requests: fl.ClientRequests, context: fl.StrategyContext
    ) -> FedDynState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        delta, share = aggregate.mean("delta"), aggregate.num_replies / context.num_sites
        correction = state.correction - share * delta if self.alpha else state.correction
        weights = state.weights + delta - correction
        return replace(state, weights=weights, norm_stats=aggregate.mean("stats"), correction=correction)

    def client_train(
        self, message: fl.Message, client_state: fl.ClientState, context: fl.StrategyContext
    ) -> fl.ClientTask:
        model = fl.received_model(message)
        linear = client_state.get("linear", torch.zeros_like(model.weights))
        term = fl.proximal_term(model.weights, self.alpha) + fl.LocalRegularizer(offset=-linear)
        job = fl.TrainJob(model.weights, model.norm_stats, context.steps, context.epochs, regularizer=term)
        result = yield from fl.run_training(job)
        return fl.make_update(model.weights, result), {"linear": linear - self.alpha * (result.weights - model.weights)}
