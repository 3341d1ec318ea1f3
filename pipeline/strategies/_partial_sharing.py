"""What FedPer, FedRep and FedBN have in common: some roles of the network stay at the site, the others are averaged.

Parameters that stay are neither sent nor changed by the coordinator; a site that has none yet begins with the start's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from pipeline.core.parameters import Role, Snapshot
from pipeline.protocol.messages import Flow, Memory, Message, SiteId, Update
from pipeline.protocol.tasks import Fit, Fitted, fitted
from pipeline.strategies.base import Ask, Global, Plan, Strategy, Thought, moved, sent


class Sharing(Strategy):
    personalised: ClassVar[bool] = True
    remembers: ClassVar[bool] = True
    keeps: tuple[Role, ...]

    def round(self, state: Global, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Global:
        total = ask.total({site: self.brief(state, site) for site in sites})
        weights = state.weights.clone()
        weights[~plan.spec.mask(self.keeps)] += total.mean("delta")
        return Global(weights, state.stats if "norm" in self.keeps else total.mean("stats"))

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        own = self.own(message, memory, plan)
        fit = yield from fitted(Fit(own.weights, own.stats, steps=plan.steps, epochs=plan.epochs))
        return self.parted(own, fit, plan)

    def own(self, message: Message, memory: Memory, plan: Plan) -> Snapshot:
        """The common model with the site's own parts in their places."""
        common = sent(message)
        if not memory:
            return common
        weights = common.weights.clone()
        weights[plan.spec.mask(self.keeps)] = memory["kept"]
        return Snapshot(weights, memory["stats"] if "norm" in self.keeps else common.stats)

    def parted(self, start: Snapshot, fit: Fitted, plan: Plan) -> tuple[Update, Memory]:
        """What is sent, and what stays."""
        stays = plan.spec.mask(self.keeps)
        update, keeps_norm = moved(start.weights, fit), "norm" in self.keeps
        mean = {"delta": update.mean["delta"][~stays]} | ({} if keeps_norm else {"stats": fit.stats})
        kept = {"kept": fit.weights[stays]} | ({"stats": fit.stats} if keeps_norm else {})
        return replace(update, mean=mean), kept if bool(torch.any(stays)) else {}

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        return self.own(message, memory, plan)
        yield
