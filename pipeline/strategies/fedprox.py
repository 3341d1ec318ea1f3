"""FedProx (Li et al. 2020, Algorithm 2): FedAvg with a proximal term in the local objective, and partial work kept.

    client k  w_k: a gamma-inexact minimizer of h_k(w) = F_k(w) + (mu/2) |w - w_t|^2, that is, the client stops once
              |grad h_k(w_k)| <= gamma |grad h_k(w_t)|
    server    as FedAvg, but clients that run out of time send what they have, and it is aggregated

With mu = 0, no gamma and nobody late it is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.strategies.base import Strategy, StrategyContext, train_with_proximal_term


class FedProx(Strategy):
    description: ClassVar[str] = (
        "like plain averaging, but sites stay closer to the global model, and may do part of the training"
    )
    paper: ClassVar[str] = "Li et al. 2020, arXiv 1812.06127"
    partial_updates: ClassVar[Literal["drop", "keep"]] = "keep"
    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0)  # strength of the proximal term
    gamma: float | None = Field(None, ge=0, lt=1)  # inexactness, checked once an epoch; None: all local work is done

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        return (yield from train_with_proximal_term(message, client_state, context, self.mu, self.gamma))
