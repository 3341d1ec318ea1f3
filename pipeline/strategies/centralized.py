"""Everybody's examples in one place: the yardstick from above. Simulation only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Fit, Fitted
from pipeline.strategies.base import Ask, Global, Plan, Strategy


class Central(Strategy):
    pools: ClassVar[bool] = True
    tasks: ClassVar[frozenset[str]] = frozenset({"judge", "profile", "profile_own"})
    name: Literal["central"] = "central"

    def round(self, state: Global, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Global:
        (fit,) = ask.here([Fit(state.weights, state.stats, steps=plan.steps, epochs=plan.epochs)])
        assert isinstance(fit, Fitted)
        return Global(fit.weights, fit.stats)
