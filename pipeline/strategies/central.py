"""Everybody's examples in one place: the yardstick from above. Simulation only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pipeline.messages import Flow, Memory, Message, SiteId, Update
from pipeline.strategies.base import Ask, Global, Plan, Strategy
from pipeline.work import Fit, Fitted


class Central(Strategy):
    pools: ClassVar[bool] = True
    name: Literal["central"] = "central"

    def round(self, state: Global, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Global:
        (fit,) = ask.here([Fit(state.weights, state.stats, steps=plan.steps, epochs=plan.epochs)])
        assert isinstance(fit, Fitted)
        return Global(fit.weights, fit.stats)

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        return Update(), memory
        yield  # a Flow that asks for no work: nobody is ever sent a training message
