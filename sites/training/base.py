"""What every trainer works with, and the parts of local training that all of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from pipeline.core.parameters import Role, Spec
from pipeline.core.seeding import generator
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Activate, Fit, Job, Result, Work
from sites.training.augmentation import NOTHING, Augment

Optimiser = Literal["sgd", "adam", "adamw"]
Balance = Literal["none", "root", "full", "sample"]
# loss weights grow with the rarity of a class to this power
POWER: Mapping[Balance, float] = {"none": 0.0, "root": 0.5, "full": 1.0, "sample": 0.0}


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
    unit: Tensor | None = None  # (N,) int64: whose example it is, where the data know

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
    augment: Augment = NOTHING
    balance: Balance = "none"
    trains: frozenset[Role] | None = None  # the roles that sites may move; None: all
    public_batch: int | None = None  # of training on public examples; None: as on others

    def rate(self, job: Fit, turn: int) -> float:
        return self.lr(turn) if job.lr is None else job.lr

    @property
    def plain(self) -> bool:
        return self.optimiser == "sgd" and not self.momentum and not self.weight_decay

    def make(self, params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer | Descent:
        return Descent(params, lr) if self.plain else self.optim(params, lr)

    def optim(self, params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
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

    public: Tensor | None = None  # rows of the pool that nobody has to protect: everybody may train on them

    def holds(self, ticket: Ticket) -> Examples:
        """What the ticket's job is about."""
        mine, job = self.examples[ticket.site], ticket.job
        if not (isinstance(job, Activate) or (isinstance(job, Fit) and job.data == "public")):
            return mine
        return Examples(mine.train[:0] if self.public is None else self.public, mine.val, mine.test)

    def weights(self, train: Tensor) -> Tensor | None:
        """(C,): what an example of each class counts in the loss. Their mean over these training examples is 1."""
        power = POWER[self.recipe.balance]
        if not power:
            return None
        counts = self.counts(train)
        rarity = (counts.sum() / counts.clamp(min=1)) ** power
        return (rarity * counts.sum() / (rarity * counts).sum().clamp(min=1)).float()

    @property
    def public_weights(self) -> Tensor | None:
        """As `weights`, of the public examples: those of a site's own would tell of all its patients at once."""
        return None if self.public is None or not len(self.public) else self.weights(self.public)

    def counts(self, train: Tensor) -> Tensor:
        """(C,) examples of each class."""
        return torch.bincount(self.pool.labels(train), minlength=self.classes)

    def moves(self, job: Fit, role: Role) -> bool:
        """As the job and the study say; on public examples as the job says."""
        limits = (job.trains, None if job.data == "public" else self.recipe.trains)
        return all(roles is None or role in roles for roles in limits)

    def moving(self, job: Fit) -> list[int]:
        """Places of the parameters that may move."""
        return [n for n, role in enumerate(self.spec.roles) if self.moves(job, role)]

    def batch(self, ticket: Ticket, step: int, index: Tensor) -> Tensor:
        """What the network sees of these examples in this step."""
        x = self.pool.inputs(index)
        if self.recipe.augment.absent:
            return x
        return self.recipe.augment(x, generator(self.seed, ticket.site, ticket.turn, ticket.nth, "augment", step))


@dataclass(frozen=True)
class Ticket:
    site: SiteId
    turn: int
    nth: int  # which job of its Flow
    job: Job
    private: bool = False  # its result leaves the site, and the study protects what it was made of


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
        wanted = recipe.batch if job.data == "train" else recipe.public_batch or recipe.batch
        batch = min(wanted or n, n) or 1
        asked = job.steps if job.steps is not None else math.ceil(n / batch) * (job.epochs or 0)
        todo = asked if job.cap is None else min(asked, job.cap)
        return cls(n, batch, asked if n else 0, 0 if (job.whole and todo < asked) or not n else todo)

    @property
    def per_epoch(self) -> int:
        return math.ceil(self.n / self.batch)

    def work(self, done: int) -> Work:
        return Work(self.asked, done, self.n)


def batches(bench: Bench, ticket: Ticket, effort: Effort) -> Iterator[Tensor]:
    """Index tensors (at most `batch` long), one a step: every epoch a new draw, the last batch of it may be short."""
    train = bench.holds(ticket).train
    chance = _chances(bench, train)
    left = effort.todo
    epoch = 0
    while left > 0:
        dice = generator(bench.seed, ticket.site, ticket.turn, ticket.nth, epoch)
        if chance is None:
            drawn = torch.randperm(len(train), generator=dice)[: effort.n]
        else:
            drawn = torch.multinomial(chance, effort.n, replacement=True, generator=dice)
        yield from train.index_select(0, drawn.to(train.device)).split(effort.batch)[:left]
        left -= effort.per_epoch
        epoch += 1


def halves(index: Tensor) -> tuple[Tensor, Tensor]:
    """A batch for looking ahead and one for the gradient there; a single example serves as both."""
    middle = (len(index) + 1) // 2
    return index[:middle], index[middle:] if len(index) > 1 else index


def _chances(bench: Bench, train: Tensor) -> Tensor | None:
    """(n,) of every training example, such that all classes that are there are drawn alike; None: all once."""
    if bench.recipe.balance != "sample":
        return None
    return (1 / bench.counts(train).double().clamp(min=1)).index_select(0, bench.pool.labels(train)).cpu()
