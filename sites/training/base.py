"""What all trainers share: configuration, requests, step budgets and the sampling of batches.

A trainer performs the local jobs of pipeline/protocol/tasks.py. Except for DP-SGD, whose randomness is secret, trainers
derive all seeds from (study seed, site, round, job, step or epoch): their results agree up to rounding and do not
depend on the order or grouping of the requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from pipeline.core.parameters import ParameterRole, ParameterSpec
from pipeline.core.seeding import seeded_generator
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import ActivationsJob, JobResult, LocalJob, LocalWork, TrainJob
from sites.data.pool import ExamplePool, SplitIndices
from sites.training.augmentation import NO_AUGMENTATION, BatchAugmentation

OptimizerName = Literal["sgd", "adam", "adamw"]
ClassBalance = Literal["none", "root", "full", "sample"]
# exponent of a class's rarity in its loss weight; "sample" balances by sampling instead
BALANCE_POWER: Mapping[ClassBalance, float] = {"none": 0.0, "root": 0.5, "full": 1.0, "sample": 0.0}


class PlainSgd:
    """SGD without momentum. `torch.optim` would import torch's compiler, which takes seconds."""

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        self.params, self.lr = list(params), lr
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.lr)


@dataclass(frozen=True)
class TrainingConfig:
    """How sites train. The job says for how long."""

    batch_size: int | None  # None: all examples
    optimizer: OptimizerName
    momentum: float
    weight_decay: float
    lr_schedule: Callable[[int], float]  # round -> learning rate
    augmentation: BatchAugmentation = NO_AUGMENTATION
    class_balance: ClassBalance = "none"
    trainable_roles: frozenset[ParameterRole] | None = None  # roles of the parameters that sites train; None: all
    public_batch_size: int | None = None  # on public examples; None: batch_size

    def learning_rate(self, job: TrainJob, round_number: int) -> float:
        return self.lr_schedule(round_number) if job.lr is None else job.lr

    @property
    def is_plain_sgd(self) -> bool:
        return self.optimizer == "sgd" and not self.momentum and not self.weight_decay

    def make_optimizer(self, params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer | PlainSgd:
        return PlainSgd(params, lr) if self.is_plain_sgd else self.make_torch_optimizer(params, lr)

    def make_torch_optimizer(self, params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr, self.momentum, weight_decay=self.weight_decay, fused=True)
        optimizer_class = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return optimizer_class(params, lr, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class TrainerContext:
    """Everything that local jobs need, the same for every trainer."""

    make_model: Callable[[], nn.Module]
    spec: ParameterSpec
    pool: ExamplePool
    split_indices: Mapping[SiteId, SplitIndices]
    config: TrainingConfig
    num_classes: int
    seed: int

    public_indices: Tensor | None = None  # pool rows of the public examples, on which every site may train

    def indices_for(self, request: TrainRequest) -> SplitIndices:
        """The examples of the request's job: the site's own, or the public ones as the training split."""
        site_indices, job = self.split_indices[request.site], request.job
        if not (isinstance(job, ActivationsJob) or (isinstance(job, TrainJob) and job.dataset == "public")):
            return site_indices
        return SplitIndices(
            site_indices.train[:0] if self.public_indices is None else self.public_indices,
            site_indices.val,
            site_indices.test,
        )

    def class_weights(self, train_indices: Tensor) -> Tensor | None:
        """(C,) loss weights of the classes, with mean 1 over these training examples; None: all equal."""
        power = BALANCE_POWER[self.config.class_balance]
        if not power:
            return None
        counts = self.class_counts(train_indices)
        rarity = (counts.sum() / counts.clamp(min=1)) ** power
        return (rarity * counts.sum() / (rarity * counts).sum().clamp(min=1)).float()

    @property
    def public_class_weights(self) -> Tensor | None:
        """(C,) loss weights for DP-SGD, from public examples: the site's class counts are private."""
        if self.public_indices is None or not len(self.public_indices):
            return None
        return self.class_weights(self.public_indices)

    def class_counts(self, train_indices: Tensor) -> Tensor:
        """(C,) number of examples of each class."""
        return torch.bincount(self.pool.labels(train_indices), minlength=self.num_classes)

    def is_trainable(self, job: TrainJob, role: ParameterRole) -> bool:
        """Whether both the job and the study train this role; on public examples only the job decides."""
        allowed_roles = (job.trainable_roles, None if job.dataset == "public" else self.config.trainable_roles)
        return all(roles is None or role in roles for roles in allowed_roles)

    def trainable_positions(self, job: TrainJob) -> list[int]:
        """Positions in `spec` of the parameters that the job trains."""
        return [position for position, role in enumerate(self.spec.roles) if self.is_trainable(job, role)]

    def load_inputs(self, request: TrainRequest, step: int, index: Tensor) -> Tensor:
        """(B, ...) float32: the augmented inputs of these pool rows; `step` seeds the augmentation."""
        x = self.pool.inputs(index)
        if self.config.augmentation.is_identity:
            return x
        return self.config.augmentation(
            x, seeded_generator(self.seed, request.site, request.round, request.job_index, "augment", step)
        )


@dataclass(frozen=True)
class TrainRequest:
    """A local job of one site. (site, round, job_index) identifies it and seeds its randomness."""

    site: SiteId
    round: int
    job_index: int  # position among the client's jobs of this round
    job: LocalJob
    is_private: bool = False  # the result leaves the site, and the study protects the examples with DP-SGD


class Trainer(Protocol):
    def run(self, requests: Sequence[TrainRequest]) -> list[JobResult]:
        """The results in the order of the requests."""


@dataclass(frozen=True)
class StepBudget:
    """The number of steps of a TrainJob at one site."""

    num_examples: int  # per epoch
    batch_size: int
    steps_requested: int  # as the job asks
    steps_allowed: int  # within the deadline

    @classmethod
    def from_job(cls, job: TrainJob, indices: SplitIndices, config: TrainingConfig) -> StepBudget:
        num_examples = indices.num_examples
        requested_batch_size = (
            config.batch_size if job.dataset == "train" else config.public_batch_size or config.batch_size
        )
        batch_size = min(requested_batch_size or num_examples, num_examples) or 1
        steps_requested = (
            job.steps if job.steps is not None else math.ceil(num_examples / batch_size) * (job.epochs or 0)
        )
        steps_allowed = steps_requested if job.max_steps is None else min(steps_requested, job.max_steps)
        return cls(
            num_examples,
            batch_size,
            steps_requested if num_examples else 0,
            0 if (job.all_or_nothing and steps_allowed < steps_requested) or not num_examples else steps_allowed,
        )

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_examples / self.batch_size)

    def local_work(self, steps_done: int) -> LocalWork:
        return LocalWork(self.steps_requested, steps_done, self.num_examples)


def iterate_batches(context: TrainerContext, request: TrainRequest, budget: StepBudget) -> Iterator[Tensor]:
    """Pool rows (B,) for each step, B <= batch_size. Each epoch is shuffled, or sampled by class weight; its last batch
    may be short.
    """
    train_indices = context.indices_for(request).train
    sampling_weights = _sampling_weights(context, train_indices)
    steps_left = budget.steps_allowed
    epoch = 0
    while steps_left > 0:
        rng = seeded_generator(context.seed, request.site, request.round, request.job_index, epoch)
        if sampling_weights is None:
            sampled = torch.randperm(len(train_indices), generator=rng)[: budget.num_examples]
        else:
            sampled = torch.multinomial(sampling_weights, budget.num_examples, replacement=True, generator=rng)
        yield from train_indices.index_select(0, sampled.to(train_indices.device)).split(budget.batch_size)[:steps_left]
        steps_left -= budget.steps_per_epoch
        epoch += 1


def split_in_halves(index: Tensor) -> tuple[Tensor, Tensor]:
    """First-order MAML: the examples of the inner step and of the gradient after it; a single example is both."""
    middle = (len(index) + 1) // 2
    return index[:middle], index[middle:] if len(index) > 1 else index


def _sampling_weights(context: TrainerContext, train_indices: Tensor) -> Tensor | None:
    """(n,) float64: sampling weights that balance the classes present; None: every example once an epoch."""
    if context.config.class_balance != "sample":
        return None
    class_weights = 1 / context.class_counts(train_indices).double().clamp(min=1)
    return class_weights.index_select(0, context.pool.labels(train_indices)).cpu()
