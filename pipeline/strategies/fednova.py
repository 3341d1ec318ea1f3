"""FedNova (Wang et al. 2020, plain local SGD): moves are averaged per unit of travel, so that who steps more does not pull more.

w <- w + (mean of travel_k) * (mean of delta_k / travel_k), where travel is the sum of the learning rates of a site's steps.
With equal steps everywhere it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch

from pipeline.core.parameters import Spec
from pipeline.protocol.messages import Flow, Memory, Message, SiteId
from pipeline.protocol.tasks import Fit, fitted
from pipeline.strategies.base import Ask, Global, Plan, Strategy, Training, moved, only_plain_sgd


class FedNova(Strategy):
    paper: ClassVar[str] = "Wang et al. 2020, arXiv 2007.07481"
    partial: ClassVar[Literal["drop", "keep"]] = "keep"
    name: Literal["fednova"] = "fednova"

    def objections(self, local: Training, spec: Spec) -> Iterator[str]:
        yield from only_plain_sgd("fednova", local)

    def round(self, state: Global, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Global:
        total = ask.total({site: self.brief(state, site) for site in sites})
        step = total.mean("travel") * total.mean("pace")
        return Global(state.weights + step, total.mean("stats"))

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        w, stats = message.vectors["weights"], message.vectors["stats"]
        fit = yield from fitted(Fit(w, stats, steps=plan.steps, epochs=plan.epochs))
        update, travel = moved(w, fit), torch.tensor(fit.travel)
        pace = (fit.weights - w) / travel.clamp(min=1e-30)
        return replace(update, mean={"pace": pace, "travel": travel, "stats": fit.stats}), memory
