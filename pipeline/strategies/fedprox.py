"""FedProx (Li et al. 2020, Algorithm 2): FedAvg with h_k(w) = F_k(w) + (mu/2)|w - w_t|^2, solved gamma-inexactly.

Sites that run out of time send what they have and are counted, where FedAvg drops them. mu = 0 is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.protocol.messages import ClientState, ClientTask, Message
from pipeline.strategies.base import Strategy, StrategyContext, train_with_proximal_term


class FedProx(Strategy):
    paper: ClassVar[str] = "Li et al. 2020, arXiv 1812.06127"
    partial_updates: ClassVar[Literal["drop", "keep"]] = "keep"
    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0)
    gamma: float | None = Field(None, ge=0, lt=1)

    def client_train(self, message: Message, client_state: ClientState, context: StrategyContext) -> ClientTask:
        return (yield from train_with_proximal_term(message, client_state, context, self.mu, self.gamma))
