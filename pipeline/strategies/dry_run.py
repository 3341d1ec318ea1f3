"""Dry run of a strategy: one client's first rounds with placeholder results, without data or training.

It shows, before any patient's image is used, which jobs a round consists of, how many private steps these are, whether
there is a job without a privacy mechanism, and what the update contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipeline.core.parameters import ModelState
from pipeline.protocol.messages import ClientState, ClientUpdate, Message
from pipeline.protocol.tasks import (
    CALIBRATION_BINS,
    SCORE_BINS,
    ActivationsJob,
    ActivationsResult,
    EvaluateJob,
    EvaluationSums,
    GradientJob,
    GradientResult,
    JobResult,
    LocalJob,
    LocalWork,
    ProfileJob,
    ProfileSums,
    TrainJob,
    TrainResult,
)
from pipeline.strategies.base import Strategy, StrategyContext

_PLACEHOLDER_WORK = LocalWork(1, 1, 1)


@dataclass(frozen=True)
class DryRunRound:
    jobs: tuple[LocalJob, ...]  # in the order in which the client yields them
    update: ClientUpdate  # its keys and shapes are a real one's, its values are not


def dry_run(strategy: Strategy, context: StrategyContext, initial_model: ModelState) -> list[DryRunRound]:
    """A client's first round, and a later one, for which it has a client state."""
    state = strategy.init_state(initial_model, context)
    client_state: ClientState = {}
    rounds = []
    for round_number in (1, 2):
        message = Message("train", round_number, strategy.train_payload(state, "site"))
        dry_run_round, client_state = _dry_run_round(strategy, message, client_state, context)
        rounds.append(dry_run_round)
    return rounds


def _dry_run_round(
    strategy: Strategy, message: Message, client_state: ClientState, context: StrategyContext
) -> tuple[DryRunRound, ClientState]:
    task = strategy.client_train(message, client_state, context)
    jobs: list[LocalJob] = []
    try:
        jobs.append(next(task))
        while True:
            jobs.append(task.send(_placeholder_result(jobs[-1])))
    except StopIteration as stop:
        update, client_state = stop.value
    assert isinstance(update, ClientUpdate)
    assert isinstance(client_state, Mapping)
    return DryRunRound(tuple(jobs), update), client_state


def _placeholder_result(job: LocalJob) -> JobResult:
    match job:
        case TrainJob():
            return TrainResult(job.initial_weights, job.norm_stats, _PLACEHOLDER_WORK, 0.0, 1.0)
        case GradientJob(weights):
            return GradientResult(torch.zeros_like(weights), _PLACEHOLDER_WORK, 0.0)
        case EvaluateJob():
            zero = torch.zeros(())
            sums = (torch.zeros(2, 2), torch.zeros(2, 2, SCORE_BINS), torch.zeros(CALIBRATION_BINS, 3))
            return EvaluationSums(zero, zero, *sums)
        case ProfileJob():
            return ProfileSums(*(torch.zeros(()) for _ in ProfileSums.__dataclass_fields__))
        case ActivationsJob():
            return ActivationsResult(torch.zeros(job.num_examples, 1), ())
