"""What every trainer works with, and the parts of local training that all of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from pipeline.messages import SiteId
from pipeline.weights import Spec
from pipeline.work import Fit, Job, Result, Work
from sites.seeds import generator

Optimiser = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class Examples:
    """One site's (or the coordinator's) rows of the pool, by split."""

    train: Tensor  # int64 indices
    val: Tensor
    test: Tensor
    epoch: int | None = None  # examples that a local epoch draws, if fewer than len(train)

    @property
    def n(self) -> int:
        return len(self.train) if self.epoch is None else self.epoch


@dataclass(frozen=True)
class Pool:
    """The examples of all simulated sites (or of one real one), once, on the device."""

    x: Tensor  # float32 in [0, 1], or uint8 where float would not fit
    y: Tensor
    device: torch.device

    def inputs(self, index: Tensor) -> Tensor:
        x = self.x.index_select(0, index)
        return x if x.is_floating_point() else x.float().div_(255)

    def labels(self, index: Tensor) -> Tensor:
        return self.y.index_select(0, index)


class Descent:
    """SGD without momentum: `torch.optim` would import its compiler, seconds that a short study need not wait."""

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        self.params, self.lr = list(params), lr
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.lr)


@dataclass(frozen=True)
class Recipe:
    """How a site trains, apart from how long."""

    batch: int | None  # None: all examples
    optimiser: Optimiser
    momentum: float
    weight_decay: float
    lr: Callable[[int], float]

    @property
    def plain(self) -> bool:
        return self.optimiser == "sgd" and not self.momentum and not self.weight_decay

    def make(self, params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer | Descent:
        if self.plain:
            return Descent(params, lr)
        if self.optimiser == "sgd":
            return torch.optim.SGD(params, lr, self.momentum, weight_decay=self.weight_decay, fused=True)
        kind = torch.optim.Adam if self.optimiser == "adam" else torch.optim.AdamW
        return kind(params, lr, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class Bench:
    """Everything local work needs, the same for every trainer."""

    make: Callable[[], nn.Module]
    spec: Spec
    pool: Pool
    examples: Mapping[SiteId, Examples]
    recipe: Recipe
    classes: int
    seed: int


@dataclass(frozen=True)
class Ticket:
    site: SiteId
    turn: int
    nth: int  # which job of its Flow
    job: Job


class Trainer(Protocol):
    def run(self, tickets: Sequence[Ticket]) -> list[Result]: ...


@dataclass(frozen=True)
class Effort:
    """How many steps a Fit comes to at one site."""

    n: int
    batch: int
    asked: int
    todo: int

    @classmethod
    def of(cls, job: Fit, examples: Examples, recipe: Recipe) -> Effort:
        n = examples.n
        batch = min(recipe.batch or n, n) or 1
        asked = job.steps if job.steps is not None else math.ceil(n / batch) * (job.epochs or 0)
        todo = asked if job.cap is None else min(asked, job.cap)
        return cls(n, batch, asked if n else 0, 0 if (job.whole and todo < asked) or not n else todo)

    @property
    def per_epoch(self) -> int:
        return math.ceil(self.n / self.batch)

    def work(self, done: int) -> Work:
        return Work(self.asked, done, self.n)


def batches(bench: Bench, ticket: Ticket, effort: Effort) -> Iterator[Tensor]:
    """Index tensors (at most `batch` long), one a step: every epoch a new shuffle, the last batch of it may be short."""
    train = bench.examples[ticket.site].train
    left = effort.todo
    epoch = 0
    while left > 0:
        shuffle = torch.randperm(
            len(train), generator=generator(bench.seed, ticket.site, ticket.turn, ticket.nth, epoch)
        )
        order = train.index_select(0, shuffle[: effort.n].to(train.device))
        yield from order.split(effort.batch)[:left]
        left -= effort.per_epoch
        epoch += 1
