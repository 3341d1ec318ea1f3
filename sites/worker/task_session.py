"""Drives one Flow at one site: checks the message, turns its deadline into a cap of steps, weighs and wraps the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.core.errors import BadMessage, BadReply, BadStrategy, TooFew
from pipeline.protocol.compression import PLAIN, Wire, residuals, without_residuals
from pipeline.protocol.messages import Excuse, Flow, Memory, Message, Packed, Reply, SiteId, Update, Weighting, weigh
from pipeline.protocol.serialization import reply_bytes
from pipeline.protocol.tasks import Fit, Fitted, Gradient, Job, Result, Slope, Work
from pipeline.strategies.base import Plan, Strategy
from sites.worker.client_state import SiteMemory

if TYPE_CHECKING:
    from sites.privacy.secure_agg_client import Desk


class Visit:
    """One message being worked on. `job` is what it wants done next; None when `answer` is ready."""

    def __init__(
        self,
        site: SiteId,
        message: Message,
        strategy: Strategy,
        plan: Plan,
        memory: SiteMemory,
        rule: Weighting,
        speed: float,
        wire: Wire = PLAIN,
        desk: Desk | None = None,
    ) -> None:
        if message.task not in strategy.tasks:
            raise BadMessage(f"{site}: {strategy.name} has no task {message.task!r}; it has {sorted(strategy.tasks)}")
        self._parcels: Mapping[str, bytes] = {}
        self._desk = desk if message.task == "train" else None
        if self._desk is not None:
            message, self._parcels = self._desk.received(message)
        self._guard = self._desk.guard if self._desk is not None else None
        self._paid = False
        self._bought = 0  # private steps that are paid for and not yet done
        self.site, self.message, self.memory, self.rule, self.wire = site, message, memory, rule, wire
        self._packed: dict[str, Packed] = {}
        self.work: Work | None = None  # done, whether or not the answer says so
        self.nth = 0
        self.job: Job | None = None
        self.answer: Reply | Excuse | None = None
        self._left = math.inf if message.deadline is None else math.floor(message.deadline * speed + 1e-9)
        self._worked = 0
        self._begun = time.perf_counter()
        have = memory.settle(message.counted) if message.task == "train" else memory.newest(message.counted)
        self._residuals = residuals(have)
        self._flow: Flow = getattr(strategy, message.task)(message, without_residuals(have), plan)
        before = self._guard.stored(message) if self._guard is not None else None
        if before is not None:  # the same noised answer again costs nothing
            self._paid = True
            self._finish(*before)
        else:
            self._advance(None)

    @property
    def private(self) -> bool:
        """Whether the next job's result leaves the site and has to be protected."""
        return self._guard is not None and isinstance(self.job, Fit | Gradient) and not _is_public(self.job)

    def give(self, result: Result) -> None:
        if isinstance(result, Fitted | Slope):
            self._bought -= result.work.done if self.private else 0
            could = min(self._left, result.work.asked)
            self._left -= result.work.done + result.work.looks
            self._worked += result.work.done
            # half a gradient is no gradient, and no step at all is no work: never welcome
            unwelcome = not self.message.partial or isinstance(result, Slope) or not self._worked
            if unwelcome and (result.work.partial or self._left < 0):
                self._excuse(f"late: {could} of {result.work.asked} steps by the deadline")
                return
        self.nth += 1
        self._advance(result)

    def parcel(self) -> bytes:
        assert self.answer is not None
        return reply_bytes(self.answer, self._packed)

    def _advance(self, result: Result | None) -> None:
        try:
            job = next(self._flow) if result is None else self._flow.send(result)
        except StopIteration as end:
            match end.value:
                case Update() as update, Mapping() as memory:
                    self._finish(update, memory)
                    return
            raise BadStrategy(
                f"{self.message.task} of a strategy ends with `return Update(...), memory`, not {end.value!r}"
            ) from None
        if not isinstance(job, Job):
            raise BadStrategy(
                f"{self.message.task} of a strategy yielded a {type(job).__name__}, which is no job; is it `yield from`?"
            )
        if isinstance(job, Fit) and self._left < math.inf:
            job = replace(job, cap=int(self._left), whole=not self.message.partial)
        self.job = job
        if self.private and not self._paid:
            self._pay()
        if self.private and isinstance(self.job, Fit):  # no step that was not paid for, whatever a strategy asks
            self.job = replace(self.job, cap=self._bought if self.job.cap is None else min(self.job.cap, self._bought))

    def _pay(self) -> None:
        """For all private steps of the turn, once: how many there can be is known before any patient is looked at."""
        assert self._guard is not None
        steps = self._guard.promise.steps
        self._paid = True
        if self._left < steps and not self.message.partial:
            self._excuse(f"late: {int(self._left)} of {steps} steps by the deadline")
            return
        self._bought = int(min(steps, self._left))
        refused = self._guard.charge(self.message, self._bought)
        if refused is not None:
            self._excuse(refused)

    def _finish(self, update: Update, memory: Memory) -> None:
        m, work = self.message, update.work
        self.work = work
        weight = weigh(self.rule, work)
        if self._guard is not None:
            # a training loss is no mechanism's: it stays here
            update = replace(update, sum={k: v for k, v in update.sum.items() if k != "train_loss"})
            self._guard.store(m, update, memory)
        if m.task == "train":
            try:
                if self._desk is not None and self._desk.masking is not None:
                    update, work, weight = self._desk.masked(m, update, weight, self._parcels), None, 1.0
                self._packed, lost = self.wire.seal(update, self._residuals, self.site, m.turn)
            except (BadMessage, BadReply, TooFew) as error:
                self._excuse(f"not sent: {error}")
                return
            self.memory.propose({**memory, **lost}, (m.turn, m.attempt))
        if m.task == "keep":
            self.memory.kept = dict(memory)
        if work is not None:
            update = replace(update, work=replace(work, seconds=round(time.perf_counter() - self._begun, 6)))
        self.job, self.answer = None, Reply(self.site, m.task, m.turn, m.attempt, update, weight)

    def _excuse(self, reason: str) -> None:
        self._flow.close()
        self.job, self.answer = None, Excuse(self.site, self.message.task, self.message.turn, reason)


def _is_public(job: Job) -> bool:
    return isinstance(job, Fit) and job.data == "public"
