"""Sites spread over threads with one core each: convolutions gain more from whole sites than from split operators."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from pipeline.core.errors import IncompatibleStudyError
from pipeline.protocol.tasks import JobResult
from sites.training.base import TrainerContext, TrainRequest
from sites.training.sequential import SequentialTrainer

if TYPE_CHECKING:
    from sites.training.dp_sgd import DpSgdTrainer


class ThreadedTrainer:
    """Every worker has a module of its own; torch releases the interpreter lock inside its operators."""

    def __init__(
        self,
        context: TrainerContext,
        num_workers: int | None = None,
        make_trainer: Callable[[TrainerContext], SequentialTrainer | DpSgdTrainer] = SequentialTrainer,
    ) -> None:
        self.num_workers = num_workers or os.cpu_count() or 1
        self._split_indices = context.split_indices
        self._idle_trainers: queue.SimpleQueue[SequentialTrainer | DpSgdTrainer] = queue.SimpleQueue()
        for _ in range(self.num_workers):
            trainer = make_trainer(context)
            if trainer.has_dropout:
                raise IncompatibleStudyError(
                    "trainer = 'threaded' cannot seed dropout separately in each thread; use trainer = 'sequential'"
                )
            self._idle_trainers.put(trainer)
        # the thread count is a property of the thread that sets it, so the main thread keeps its own
        self._executor = ThreadPoolExecutor(self.num_workers, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, requests: Sequence[TrainRequest]) -> list[JobResult]:
        """The site with the most examples begins, so that no thread waits long for the last one."""
        num_examples = {n: len(self._split_indices[t.site].train) for n, t in enumerate(requests)}
        order = sorted(num_examples, key=lambda n: -num_examples[n])
        results = dict(zip(order, self._executor.map(self._run_request, (requests[n] for n in order)), strict=True))
        return [results[n] for n in range(len(requests))]

    def _run_request(self, request: TrainRequest) -> JobResult:
        trainer = self._idle_trainers.get()
        try:
            return trainer.run_request(request)
        finally:
            self._idle_trainers.put(trainer)
