"""A turn of a strategy with nothing trained: which jobs it asks for, and what it would send.

Work is data, so it can be looked at before any patient is: how many private steps a turn takes, and whether there is a
job for which no privacy mechanism exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.core.parameters import Snapshot
from pipeline.protocol.messages import Memory, Message, Update
from pipeline.protocol.tasks import (
    CALIBRATION_BINS,
    SCORE_BINS,
    Activate,
    Activations,
    Evaluate,
    Evaluated,
    Fit,
    Fitted,
    Gradient,
    Job,
    Profile,
    Profiled,
    Result,
    Slope,
    Work,
)
from pipeline.strategies.base import Plan, Strategy

_WORK = Work(1, 1, 1)


@dataclass(frozen=True)
class Turn:
    jobs: tuple[Job, ...]
    update: Update


def rehearse(strategy: Strategy, plan: Plan, start: Snapshot) -> list[Turn]:
    """A site's first turn and a later one, in which it remembers the first."""
    state = strategy.start(start, plan)
    memory: Memory = {}
    turns = []
    for number in (1, 2):
        message = Message("train", number, strategy.brief(state, "site"))
        turn, memory = _turn(strategy, message, memory, plan)
        turns.append(turn)
    return turns


def _turn(strategy: Strategy, message: Message, memory: Memory, plan: Plan) -> tuple[Turn, Memory]:
    flow = strategy.train(message, memory, plan)
    jobs: list[Job] = []
    try:
        jobs.append(next(flow))
        while True:
            jobs.append(flow.send(_as_if(jobs[-1])))
    except StopIteration as end:
        update, memory = end.value
    assert isinstance(update, Update)
    assert isinstance(memory, Mapping)
    return Turn(tuple(jobs), update), memory


def _as_if(job: Job) -> Result:
    match job:
        case Fit():
            return Fitted(job.start, job.stats, _WORK, 0.0, 1.0)
        case Gradient(at):
            return Slope(torch.zeros_like(at), _WORK, 0.0)
        case Evaluate():
            zero = torch.zeros(())
            sums = (torch.zeros(2, 2), torch.zeros(2, 2, SCORE_BINS), torch.zeros(CALIBRATION_BINS, 3))
            return Evaluated(zero, zero, *sums)
        case Profile():
            return Profiled(*(torch.zeros(()) for _ in Profiled.__dataclass_fields__))
        case Activate():
            return Activations(torch.zeros(job.count, 1), ())
