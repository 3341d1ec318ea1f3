"""FedProx (Li et al. 2020, Algorithm 2): FedAvg with h_k(w) = F_k(w) + (mu/2)|w - w_t|^2, solved gamma-inexactly.

Sites that run out of time send what they have and are counted, where FedAvg drops them. mu = 0 is FedAvg.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pipeline.protocol.messages import Flow, Memory, Message
from pipeline.strategies.base import Plan, Strategy, fit_near


class FedProx(Strategy):
    paper: ClassVar[str] = "Li et al. 2020, arXiv 1812.06127"
    partial: ClassVar[Literal["drop", "keep"]] = "keep"
    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0)
    gamma: float | None = Field(None, ge=0, lt=1)

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        return (yield from fit_near(message, memory, plan, self.mu, self.gamma))
