"""FedRep (Collins et al. 2021, Algorithm 1): first the site's own head is fitted to the common body, then the body to it.

With keeps = [] and head_epochs = 0 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import NonNegativeInt

from pipeline.core.parameters import Role, Spec
from pipeline.protocol.messages import Flow, Memory, Message
from pipeline.protocol.tasks import Fit, fitted
from pipeline.strategies._partial_sharing import Sharing
from pipeline.strategies.base import Plan, Training

ROLES: frozenset[Role] = frozenset(("body", "head", "norm"))


class FedRep(Sharing):
    paper: ClassVar[str] = "Collins et al. 2021, arXiv 2102.07078"
    remembered: ClassVar[str] = "its head"
    name: Literal["fedrep"] = "fedrep"
    keeps: tuple[Role, ...] = ("head",)
    head_epochs: NonNegativeInt = 5

    def objections(self, local: Training, spec: Spec) -> Iterator[str]:
        if self.head_epochs and not self.keeps:
            yield "fedrep has no part to fit first; set strategy.keeps, or strategy.head_epochs = 0"

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        own = self.own(message, memory, plan)
        start, stats, done = own.weights, own.stats, None
        if self.head_epochs:
            head = yield from fitted(Fit(start, stats, epochs=self.head_epochs, trains=frozenset(self.keeps)))
            start, stats, done = head.weights, head.stats, head.work
        trains = ROLES - set(self.keeps) if self.keeps else None
        fit = yield from fitted(Fit(start, stats, steps=plan.steps, epochs=plan.epochs, trains=trains))
        update, kept = self.parted(own, fit, plan)
        return (update if done is None else replace(update, work=done + fit.work)), kept
