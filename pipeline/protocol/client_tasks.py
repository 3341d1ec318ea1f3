"""Client tasks under a deadline: the only place that turns a deadline into steps.

A client task is a generator of local jobs. `intercept_jobs` wraps one, so that what limits or charges its jobs is written
once and composes: the task session limits steps to the deadline, and the budget guard charges private steps on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.core.errors import TaskDeclinedError
from pipeline.protocol.messages import ClientState, ClientTask, ClientUpdate
from pipeline.protocol.tasks import GradientJob, GradientResult, JobResult, LocalJob, TrainJob, TrainResult


def intercept_jobs(
    task: ClientTask, on_job: Callable[[LocalJob], LocalJob], on_result: Callable[[LocalJob, JobResult], None]
) -> ClientTask:
    """The same task, with every job replaced by `on_job(job)` and every result shown to `on_result(job, result)`.

    Both may raise `TaskDeclinedError`, which ends the task.
    """
    try:
        job = on_job(next(task))
        while True:
            result = yield job
            on_result(job, result)
            job = on_job(task.send(result))
    except StopIteration as stop:
        finished: tuple[ClientUpdate, ClientState] = stop.value
        return finished
    finally:
        task.close()


def is_private_job(job: LocalJob | None) -> bool:
    """Whether the job reads the site's own training examples and its result may leave the site."""
    return isinstance(job, TrainJob | GradientJob) and not (isinstance(job, TrainJob) and job.dataset == "public")


@dataclass
class StepAllowance:
    """The steps that are left until a task's deadline.

    The deadline holds for all jobs of the task together. Work that it cuts short is worth sending only if the coordinator
    accepts partial updates.
    """

    steps_left: float  # infinite without a deadline
    accept_partial: bool
    steps_done: int = 0

    @classmethod
    def until_deadline(cls, deadline: float | None, steps_per_second: float, accept_partial: bool) -> StepAllowance:
        """`deadline`: seconds; the tolerance is for deadlines such as 0.3 that have no exact binary form."""
        steps = math.inf if deadline is None else math.floor(deadline * steps_per_second + 1e-9)
        return cls(steps, accept_partial)

    def limit_steps(self, task: ClientTask) -> ClientTask:
        """The task, cut short or declined as late at the deadline."""
        return intercept_jobs(task, self._limit_job, self._count_steps)

    def reserve(self, steps: int) -> int:
        """How many of `steps` fit; declines as late if not all do and the coordinator accepts no partial update."""
        if self.steps_left < steps and not self.accept_partial:
            raise TaskDeclinedError("late", f"{int(self.steps_left)} of {steps} steps by the deadline")
        return int(min(steps, self.steps_left))

    def _limit_job(self, job: LocalJob) -> LocalJob:
        if isinstance(job, TrainJob) and self.steps_left < math.inf:
            return replace(job, max_steps=int(self.steps_left), all_or_nothing=not self.accept_partial)
        return job

    def _count_steps(self, job: LocalJob, result: JobResult) -> None:
        if not isinstance(result, TrainResult | GradientResult):
            return
        work = result.work
        affordable_steps = min(self.steps_left, work.steps_requested)
        self.steps_left -= work.steps_done + work.eval_steps
        self.steps_done += work.steps_done
        # a partial gradient, or a result without any step, is never accepted
        rejects_partial = not self.accept_partial or isinstance(result, GradientResult) or not self.steps_done
        if rejects_partial and (work.is_partial or self.steps_left < 0):
            raise TaskDeclinedError("late", f"{affordable_steps} of {work.steps_requested} steps by the deadline")
