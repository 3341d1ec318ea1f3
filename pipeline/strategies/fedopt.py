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

from pipeline.core.parameters import Snapshot, Vec
from pipeline.protocol.messages import Flow, Memory, Message, SiteId
from pipeline.strategies.base import Ask, Global, Plan, Strategy, fit_near


@dataclass(frozen=True)
class State(Global):
    m: Vec
    v: Vec


class FedOpt(Strategy):
    paper: ClassVar[str] = "Reddi et al. 2021, arXiv 2003.00295"
    state: ClassVar[type] = State
    holds: ClassVar[str] = "the model, first and second moments of its moves"
    name: Literal["fedopt"] = "fedopt"
    optimiser: Literal["momentum", "adagrad", "adam", "yogi"] = "adam"
    server_lr: float | None = Field(None, gt=0)  # None: 1 for momentum, 0.01 for the others
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.99, ge=0, lt=1)
    tau: float = Field(1e-3, gt=0)  # how adaptive: small is very
    mu: float = Field(0.0, ge=0)  # FedProx's pull at the sites

    def start(self, start: Snapshot, plan: Plan) -> State:
        zero = torch.zeros_like(start.weights)
        return State(start.weights, start.stats, zero, zero + self.tau**2)

    def round(self, state: State, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> State:
        total = ask.total({site: self.brief(state, site) for site in sites})
        delta = total.mean("delta")
        m, v = self._moments(state, delta)
        if self.optimiser == "momentum":
            step = (1.0 if self.server_lr is None else self.server_lr) * m
        else:
            step = (0.01 if self.server_lr is None else self.server_lr) * m / (v.sqrt() + self.tau)
        return State(state.weights + step, total.mean("stats"), m, v)

    def _moments(self, state: State, delta: Vec) -> tuple[Vec, Vec]:
        m, v, square = state.m, state.v, delta.square()
        mixed = self.beta1 * m + (1 - self.beta1) * delta
        match self.optimiser:
            case "momentum":
                return self.beta1 * m + delta, v
            case "adagrad":
                return mixed, v + square
            case "adam":
                return mixed, self.beta2 * v + (1 - self.beta2) * square
            case "yogi":
                return mixed, v - (1 - self.beta2) * square * torch.sign(v - square)

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        return (yield from fit_near(message, memory, plan, self.mu))
