"""pFedMe (Dinh et al. 2020, Algorithm 1): a site's model theta minimises F_k(theta) + (lambda/2)|theta - w|^2.

R times a round: theta is found roughly, by `inner` steps, and w moves towards it by eta * lambda * (theta - w). The
coordinator takes (1 - beta) w + beta * mean of the sites' w. With R = 1 and eta = 1/lambda the common model is
FedProx's with mu = lambda. Each inner step draws a batch of its own, where the paper keeps one for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.protocol.messages import Flow, Memory, Message, SiteId
from pipeline.protocol.tasks import Fit, Work, fitted, toward
from pipeline.strategies.base import Ask, Global, Plan, Strategy, Thought, moved, remembered, sent


class PFedMe(Strategy):
    paper: ClassVar[str] = "Dinh et al. 2020, arXiv 2006.08848"
    personalised: ClassVar[bool] = True
    remembers: ClassVar[bool] = True
    remembered: ClassVar[str] = "theta"
    name: Literal["pfedme"] = "pfedme"
    lam: float = Field(15.0, gt=0)
    eta: PositiveFloat = 0.005  # of w; eta * lam is the share of the way to theta
    beta: float = Field(1.0, gt=0)
    rounds: PositiveInt = 20  # R, local ones
    inner: PositiveInt = 5  # K, steps for theta
    personal_lr: PositiveFloat | None = None  # of theta; else the round's

    def round(self, state: Global, sites: Sequence[SiteId], ask: Ask, plan: Plan) -> Global:
        total = ask.total({site: self.brief(state, site) for site in sites})
        return Global(state.weights + self.beta * total.mean("delta"), total.mean("stats"))

    def train(self, message: Message, memory: Memory, plan: Plan) -> Flow:
        start = sent(message)
        w, theta, stats = start.weights, start.weights, start.stats
        done: Work | None = None
        loss, delta = 0.0, w - w
        for _ in range(self.rounds):
            job = Fit(theta, stats, steps=self.inner, pull=toward(w, self.lam), lr=self.personal_lr)
            fit = yield from fitted(job)
            theta, stats = fit.weights, fit.stats
            done = fit.work if done is None else done + fit.work
            loss += fit.loss / self.rounds
            delta = delta + self.eta * self.lam * (theta - w)
            w = start.weights + delta
        update = moved(start.weights, fit, delta=delta, loss=loss, work=done)
        return update, {"weights": theta, "stats": stats}

    def personal(self, message: Message, memory: Memory, plan: Plan) -> Thought:
        return remembered(memory, message)
        yield
