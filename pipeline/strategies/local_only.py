"""No federation: every site trains alone from the common start and keeps its model. The yardstick from below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pipeline.core.parameters import Snapshot
from pipeline.protocol.messages import Flow, Memory, Message, SiteId, Update
from pipeline.protocol.tasks import Fit, fitted
from pipeline.strategies.base import Ask, Global, Plan, Strategy, Thought, moved, remembered


class Local(Strategy):
    partial: ClassVar[Literal["drop", "keep"]] = "keep"
    remembers: ClassVar[bool] = True
    holds: ClassVar[str] = "the start"
    remembered: ClassVar[str] = "the site's model"
    name: Literal["local"] = "local"

    def round(self, state: Global, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Global:
        ask.total({site: self.brief(state, site) for site in sites})
        return state

    def models(self, state: Any) -> Mapping[str, Snapshot]:
        return {}  # the models are in the sites' memories

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        own = remembered(memory, message)
        fit = yield from fitted(Fit(own.weights, own.stats, steps=plan.steps, epochs=plan.epochs))
        sent = moved(own.weights, fit)
        return Update(sum=sent.sum, work=fit.work), {"weights": fit.weights, "stats": fit.stats}

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        return remembered(memory, message)
        yield
