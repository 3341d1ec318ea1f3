"""A client task under a deadline: how many steps its jobs get, and when it is declined as late."""

import pytest
import torch

from pipeline.core.errors import TaskDeclinedError
from pipeline.protocol.client_tasks import StepAllowance, intercept_jobs, is_private_job
from pipeline.protocol.messages import ClientUpdate
from pipeline.protocol.tasks import (
    EvaluateJob,
    GradientJob,
    GradientResult,
    LocalWork,
    TrainJob,
    TrainResult,
)

W = torch.zeros(2)


def trained(requested, done, eval_steps=0):
    return TrainResult(W, W, LocalWork(requested, done, 40, eval_steps=eval_steps), loss=0.5, lr_sum=None)


def two_jobs(first, second):
    """A task of two jobs, which returns the results in its client state."""
    results = [(yield first), (yield second)]
    return ClientUpdate(), {"results": results}


def run(task, *results):
    """The jobs that the task yields, and what it returns."""
    jobs = [next(task)]
    for result in results:
        try:
            jobs.append(task.send(result))
        except StopIteration as stop:
            return jobs, stop.value
    return jobs, None


@pytest.mark.parametrize(("deadline", "speed", "steps"), [(2.5, 3.0, 7), (0.3, 10.0, 3), (4.0, 0.2, 0)])
def test_a_deadline_is_rounded_down_to_whole_steps(deadline, speed, steps):
    assert StepAllowance.until_deadline(deadline, speed, accept_partial=True).steps_left == steps


def test_the_deadline_is_for_all_jobs_together_and_counts_evaluation_steps():
    task = StepAllowance(steps_left=20, accept_partial=True).limit_steps(two_jobs(TrainJob(W), TrainJob(W)))
    jobs, (_, state) = run(task, trained(12, 12, eval_steps=3), trained(12, 5))
    assert [job.max_steps for job in jobs] == [20, 5]
    assert not jobs[0].all_or_nothing
    assert [result.work.steps_done for result in state["results"]] == [12, 5]


def test_without_a_deadline_nothing_is_limited():
    task = StepAllowance.until_deadline(None, 3.0, accept_partial=False).limit_steps(two_jobs(TrainJob(W), TrainJob(W)))
    jobs, _ = run(task, trained(12, 12), trained(12, 12))
    assert [job.max_steps for job in jobs] == [None, None]


@pytest.mark.parametrize(
    ("accept_partial", "result", "is_late"),
    [
        (True, trained(12, 5), False),
        (False, trained(12, 5), True),
        (False, trained(5, 5), False),
        (False, trained(5, 5, eval_steps=1), True),  # the work is done, but after the deadline
        (True, trained(12, 0), True),  # nothing was done
        (True, GradientResult(W, LocalWork(12, 5, 40), 0.5), True),  # a part of the gradient is no gradient
    ],
)
def test_partial_work_is_late_unless_the_coordinator_accepts_it(accept_partial, result, is_late):
    job = GradientJob(W) if isinstance(result, GradientResult) else TrainJob(W)
    task = StepAllowance(steps_left=5, accept_partial=accept_partial).limit_steps(
        two_jobs(job, EvaluateJob(W, "val", W))
    )
    if is_late:
        requested = min(5, result.work.steps_requested)
        with pytest.raises(
            TaskDeclinedError, match=rf"^{requested} of {result.work.steps_requested} steps"
        ) as declined:
            run(task, result)
        assert declined.value.kind == "late"
    else:
        assert len(run(task, result)[0]) == 2


@pytest.mark.parametrize(
    ("left", "accept_partial", "reserved"), [(7, False, 7), (7, True, 7), (9, False, 7), (6, True, 6), (6, False, None)]
)
def test_reserving_steps_before_a_charge(left, accept_partial, reserved):
    allowance = StepAllowance(left, accept_partial)
    if reserved is None:
        with pytest.raises(TaskDeclinedError, match=r"^6 of 7 steps"):
            allowance.reserve(7)
    else:
        assert allowance.reserve(7) == reserved


def test_a_declined_task_is_closed():
    closed = []

    def task():
        try:
            yield TrainJob(W)
        finally:
            closed.append(True)

    def refuse(job, result):
        raise TaskDeclinedError("late", "too slow")

    intercepted = intercept_jobs(task(), lambda job: job, refuse)
    next(intercepted)
    with pytest.raises(TaskDeclinedError, match="too slow"):
        intercepted.send(trained(3, 3))
    assert closed == [True]


def test_jobs_on_public_examples_are_not_private():
    assert is_private_job(TrainJob(W))
    assert is_private_job(GradientJob(W))
    assert not is_private_job(TrainJob(W, dataset="public"))
    assert not is_private_job(EvaluateJob(W, "val", W))
