"""Sites spread over threads with one core each: convolutions gain more from whole sites than from split operators."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from pipeline.core.errors import Refused
from pipeline.protocol.tasks import Result
from sites.training.base import Bench, Ticket
from sites.training.sequential import Loop

if TYPE_CHECKING:
    from sites.training.dp_sgd import Private


class ThreadPool:
    """Every worker has a module of its own; torch releases the interpreter lock inside its operators."""

    def __init__(
        self, bench: Bench, workers: int | None = None, make: Callable[[Bench], Loop | Private] = Loop
    ) -> None:
        self.workers = workers or os.cpu_count() or 1
        self._examples = bench.examples
        self._idle: queue.SimpleQueue[Loop | Private] = queue.SimpleQueue()
        for _ in range(self.workers):
            loop = make(bench)
            if loop.drops:
                raise Refused("trainer = 'pool' cannot seed dropout apart for every thread; use trainer = 'loop'")
            self._idle.put(loop)
        # the thread count is a property of the thread that sets it, so the main thread keeps its own
        self._threads = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, tickets: Sequence[Ticket]) -> list[Result]:
        """The site with the most examples begins, so that no thread waits long for the last one."""
        size = {n: len(self._examples[t.site].train) for n, t in enumerate(tickets)}
        order = sorted(size, key=lambda n: -size[n])
        done = dict(zip(order, self._threads.map(self._one, (tickets[n] for n in order)), strict=True))
        return [done[n] for n in range(len(tickets))]

    def _one(self, ticket: Ticket) -> Result:
        loop = self._idle.get()
        try:
            return loop.one(ticket)
        finally:
            self._idle.put(loop)
