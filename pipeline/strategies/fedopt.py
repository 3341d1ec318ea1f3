"""FedOpt (Reddi et al. 2021, Algorithm 2): the sites' mean move is a gradient for an optimiser at the coordinator.

Momentum (FedAvgM), Adagrad, Adam or Yogi. Momentum with beta1 = 0 and server_lr = 1 is FedAvg. BatchNorm statistics are
averaged and never stepped: Adam would drive a variance below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field

from pipeline.core.parameters import ModelState, ParamVector
from pipeline.protocol.messages import ClientState, ClientTask, Message, SiteId
from pipeline.strategies.base import (
    ClientRequests,
    GlobalModelState,
    Strategy,
    StrategyContext,
    train_with_proximal_term,
)


@dataclass(frozen=True)
class FedOptState(GlobalModelState):
    first_moment: ParamVector
    second_moment: ParamVector


class FedOpt(Strategy):
    paper: ClassVar[str] = "Reddi et al. 2021, arXiv 2003.00295"
    state_type: ClassVar[type] = FedOptState
    server_state_text: ClassVar[str] = "the model, first and second moments of its moves"
    name: Literal["fedopt"] = "fedopt"
    optimizer: Literal["momentum", "adagrad", "adam", "yogi"] = "adam"
    server_lr: float | None = Field(None, gt=0)  # None: 1 for momentum, 0.01 for the others
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)  # how adaptive: small is very
    mu: float = Field(0.0, ge=0)  # FedProx's pull at the sites

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> FedOptState:
        zero = torch.zeros_like(initial_model.weights)
        return FedOptState(initial_model.weights, initial_model.norm_stats, zero, zero + self.tau**2)

    def run_round(
        self, state: FedOptState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> FedOptState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        delta = aggregate.mean("delta")
        m, v = self._update_moments(state, delta)
        if self.optimizer == "momentum":
            step = (1.0 if self.server_lr is None else self.server_lr) * m
        else:
            step = (0.01 if self.server_lr is None else self.server_lr) * m / (v.sqrt() + self.tau)
        return FedOptState(state.weights + step, aggregate.mean("stats"), m, v)

    def _update_moments(self, state: FedOptState, delta: ParamVector) -> tuple[ParamVector, ParamVector]:
        m, v, delta_squared = state.first_moment, state.second_moment, delta.square()
        averaged = self.beta1 * m + (1 - self.beta1) * delta
        match self.optimizer:
            case "momentum":
                return self.beta1 * m + delta, v
            case "adagrad":
                return averaged, v + delta_squared
            case "adam":
                return averaged, self.beta2 * v + (1 - self.beta2) * delta_squared
            case "yogi":
                return averaged, v - (1 - self.beta2) * delta_squared * torch.sign(v - delta_squared)

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        return (yield from train_with_proximal_term(message, client_state, context, self.mu))
