"""FedOpt (Reddi et al. 2021, Algorithm 2): the clients' mean delta is a pseudo-gradient for a server optimizer.

    server  m <- beta1 m + (1 - beta1) delta
            v <- v + delta^2                                             (FedAdagrad)
            v <- beta2 v + (1 - beta2) delta^2                           (FedAdam)
            v <- v - (1 - beta2) delta^2 sign(v - delta^2)               (FedYogi)
            w <- w + eta m / (sqrt(v) + tau)

FedAvgM, the fourth optimizer, takes m <- beta1 m + delta and w <- w + eta m; with beta1 = 0 and eta = 1 it is FedAvg.
BatchNorm statistics are averaged and never stepped: Adam would drive a variance below zero.
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
    first_moment: ParamVector  # m
    second_moment: ParamVector  # v


class FedOpt(Strategy):
    description: ClassVar[str] = "like plain averaging, with a smoother step at the coordinator"
    paper: ClassVar[str] = "Reddi et al. 2021, arXiv 2003.00295"
    state_type: ClassVar[type] = FedOptState
    server_state_text: ClassVar[str] = "the model, the first and second moments of its deltas"
    name: Literal["fedopt"] = "fedopt"
    optimizer: Literal["momentum", "adagrad", "adam", "yogi"] = "adam"  # of the server; momentum is FedAvgM
    server_lr: float | None = Field(None, gt=0)  # eta; None: 1 for momentum, 0.01 for the adaptive optimizers
    beta1: float = Field(0.9, ge=0, lt=1)  # decay of the first moment
    beta2: float = Field(0.99, ge=0, lt=1)  # decay of the second moment, for adam and yogi
    tau: float = Field(1e-3, gt=0)  # degree of adaptivity: the smaller, the more adaptive; v starts at tau^2
    mu: float = Field(0.0, ge=0)  # strength of FedProx's proximal term at the clients

    def init_state(self, initial_model: ModelState, context: StrategyContext) -> FedOptState:
        zero = torch.zeros_like(initial_model.weights)
        return FedOptState(initial_model.weights, initial_model.norm_stats, zero, zero + self.tau**2)

    def run_round(
        self, state: FedOptState, clients: Sequence[SiteId], requests: ClientRequests, context: StrategyContext
    ) -> FedOptState:
        aggregate = requests.aggregate({site: self.train_payload(state, site) for site in clients})
        m, v = self._update_moments(state, aggregate.mean("delta"))
        if self.optimizer == "momentum":
            step = (1.0 if self.server_lr is None else self.server_lr) * m
        else:
            step = (0.01 if self.server_lr is None else self.server_lr) * m / (v.sqrt() + self.tau)
        return FedOptState(state.weights + step, aggregate.mean("stats"), m, v)

    def _update_moments(self, state: FedOptState, delta: ParamVector) -> tuple[ParamVector, ParamVector]:
        m, v, delta_squared = state.first_moment, state.second_moment, delta.square()
        m_averaged = self.beta1 * m + (1 - self.beta1) * delta
        match self.optimizer:
            case "momentum":
                return self.beta1 * m + delta, v
            case "adagrad":
                return m_averaged, v + delta_squared
            case "adam":
                return m_averaged, self.beta2 * v + (1 - self.beta2) * delta_squared
            case "yogi":
                return m_averaged, v - (1 - self.beta2) * delta_squared * torch.sign(v - delta_squared)

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        return (yield from train_with_proximal_term(message, client_state, context, self.mu))
