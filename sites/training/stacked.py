"""Trains S sites at once: parameters are stacked to (S, ...), batches to (S, B, ...), and one step updates all sites.

Gradients come from `torch.func` over the module, or for MLPs from stacked_mlp.py, which is twice as fast. Sites are
sorted by their number of steps, so the sites that still train are a prefix of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from pipeline.core.errors import IncompatibleStudyError
from pipeline.protocol.tasks import JobResult, TrainJob, TrainResult
from sites.training.base import PlainSgd, StepBudget, TrainerContext, TrainRequest, iterate_batches, split_in_halves
from sites.training.sequential import SequentialTrainer
from sites.training.stacked_mlp import StackedMlpGradients

# params [(S, ...)], x (S, B, ...), y (S, B), example_weights (S, B) -> losses (S,); writes the gradients to `.grad`
GradientFunction = Callable[[list[Tensor], Tensor, Tensor, Tensor], Tensor]


class StackedTrainer:
    """Jobs that cannot be stacked (inexactness, evaluation) run in a `SequentialTrainer`.

    The stack is divided into one part per core. Each part has its own thread and one operator thread: the parts wait
    for each other once per job, whereas operator threads would wait after every operator, long if the machine is busy.
    """

    def __init__(self, context: TrainerContext, num_workers: int = 1) -> None:
        self.context = context
        self.sequential_trainer = SequentialTrainer(context)
        if context.spec.num_norm_stats or self.sequential_trainer.has_dropout:
            raise IncompatibleStudyError(
                "trainer = 'stacked' supports neither BatchNorm nor dropout; use trainer = 'sequential'"
            )
        mlp_gradients = StackedMlpGradients.from_module(self.sequential_trainer.module)
        self.compute_losses_and_gradients: GradientFunction = (
            mlp_gradients if mlp_gradients else make_vmap_gradients(self.sequential_trainer.module, context.spec.names)
        )
        # functional_call swaps the parameters of the module, which threads would share
        self.num_workers = num_workers if mlp_gradients else 1
        self._executor = ThreadPoolExecutor(self.num_workers, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, requests: Sequence[TrainRequest]) -> list[JobResult]:
        stackable: dict[object, list[int]] = {}  # settings that a stack must share -> positions of the requests
        for position, request in enumerate(requests):
            job = request.job
            if isinstance(job, TrainJob) and job.inexactness is None:
                lr = self.context.config.learning_rate(job, request.round)
                stackable.setdefault((job.trainable_roles, job.dataset, job.maml_lr, lr), []).append(position)
        parts = [
            positions[worker :: self.num_workers]
            for positions in stackable.values()
            for worker in range(self.num_workers)
        ]
        stacks = [[requests[i] for i in part] for part in parts]
        trained = map(self.train, stacks) if self.num_workers == 1 else self._executor.map(self.train, stacks)
        results: dict[int, JobResult] = {}
        for part, stack_results in zip(parts, trained, strict=True):
            results.update(zip(part, stack_results, strict=True))
        return [
            results[position] if position in results else self.sequential_trainer.run_request(request)
            for position, request in enumerate(requests)
        ]

    def train(self, requests: Sequence[TrainRequest]) -> list[TrainResult]:
        """One stack: TrainJobs that share learning rate, `maml_lr`, trainable roles and dataset."""
        if not requests:
            return []
        context, device = self.context, self.context.pool.device
        clients = sorted(
            (StackedClient.from_request(context, request, position) for position, request in enumerate(requests)),
            key=lambda client: -client.budget.steps_allowed,
        )
        initial_weights = torch.stack([client.job.initial_weights for client in clients]).to(device)  # (S, P)
        params = [p.clone() for p in context.spec.split_parameters(initial_weights)]
        stack = ActiveStack(context, clients, params)
        loss_sums = torch.zeros(len(clients), device=device)
        steps_done, active = 0, len(clients)
        while active := sum(client.budget.steps_allowed > steps_done for client in clients[:active]):
            stack.narrow_to(active)
            loss_sums[:active] += self.compute_gradients(stack.params, clients[:active], steps_done)
            stack.step()
            steps_done += 1
        final_weights = torch.cat([p.reshape(len(clients), -1) for p in params], 1).cpu()
        results = {
            client.position: client.make_result(weights, float(loss_sum))
            for client, weights, loss_sum in zip(clients, final_weights, loss_sums.cpu(), strict=True)
        }
        return [results[position] for position in range(len(requests))]

    def compute_gradients(self, params: list[Tensor], clients: Sequence[StackedClient], step: int) -> Tensor:
        """Writes the gradients to `.grad` and returns the losses (S,). First-order MAML as in `SequentialTrainer`."""
        indices = [next(client.batches) for client in clients]
        maml_lr = clients[0].job.maml_lr
        if not maml_lr:
            return self.compute_losses_and_gradients(params, *gather_batch(self.context, clients, step, indices))
        first, second = zip(*map(split_in_halves, indices), strict=True)
        self.compute_losses_and_gradients(params, *gather_batch(self.context, clients, 2 * step, first))
        lookahead = [p - maml_lr * p.grad for p in params]  # type: ignore[operator]
        loss = self.compute_losses_and_gradients(lookahead, *gather_batch(self.context, clients, 2 * step + 1, second))
        for p, q in zip(params, lookahead, strict=True):
            p.grad = q.grad
        return loss


@dataclass(frozen=True)
class StackedClient:
    """A site's job in a stack."""

    position: int  # among the requests
    request: TrainRequest
    job: TrainJob
    budget: StepBudget
    batches: Iterator[Tensor]
    lr: float
    is_plain_sgd: bool
    class_weights: Tensor | None  # (C,) in the loss

    @classmethod
    def from_request(cls, context: TrainerContext, request: TrainRequest, position: int) -> StackedClient:
        assert isinstance(request.job, TrainJob)
        indices = context.indices_for(request)
        budget = StepBudget.from_job(request.job, indices, context.config)
        lr = context.config.learning_rate(request.job, request.round)
        return cls(
            position=position,
            request=request,
            job=request.job,
            budget=budget,
            batches=iterate_batches(context, request, budget),
            lr=lr,
            is_plain_sgd=context.config.is_plain_sgd,
            class_weights=context.class_weights(indices.train),
        )

    def make_result(self, weights: Tensor, loss_sum: float) -> TrainResult:
        steps_done = self.budget.steps_allowed
        work = self.budget.local_work(steps_done)
        return TrainResult(
            weights.clone(),
            self.job.norm_stats,
            work,
            loss_sum / max(steps_done, 1),
            self.lr * steps_done if self.is_plain_sgd else None,
        )


class ActiveStack:
    """The first sites of the stack, which still train: views of their parameters, their optimizer and regularizers."""

    def __init__(self, context: TrainerContext, clients: Sequence[StackedClient], params: list[Tensor]) -> None:
        self.context, self.clients, self.all_params = context, clients, params
        self.params: list[Tensor] = []
        self.optimizer: torch.optim.Optimizer | PlainSgd | None = None
        self.regularizer_terms = self._stack_regularizers()

    def narrow_to(self, active: int) -> None:
        """Restricts the stack to its first `active` sites, optimizer state included."""
        if self.params and len(self.params[0]) == active:
            return
        previous_params, self.params = self.params, [p[:active] for p in self.all_params]
        trainable_positions = self.context.trainable_positions(self.clients[0].job)
        optimizer = self.context.config.make_optimizer(
            [self.params[n] for n in trainable_positions], self.clients[0].lr
        )
        if self.optimizer is not None:  # the remaining sites keep their optimizer state
            for old, new in zip(previous_params, self.params, strict=True):
                state = self.optimizer.state.get(old, {})
                optimizer.state[new] = {k: v[:active] if v.dim() else v for k, v in state.items() if v is not None}
        self.optimizer = optimizer

    def step(self) -> None:
        assert self.optimizer is not None
        active = len(self.params[0])
        for p, slope, offset in (
            zip(self.params, *self.regularizer_terms, strict=True) if self.regularizer_terms else ()
        ):
            p.grad.addcmul_(slope[:active], p).add_(offset[:active])
        self.optimizer.step()

    def _stack_regularizers(self) -> list[list[Tensor]]:
        """[slopes, offsets], each a list of (S, ...) tensors, one per parameter; empty if no site has a regularizer."""
        regularizers = [client.job.regularizer for client in self.clients]
        if all(regularizer.is_zero for regularizer in regularizers):
            return []
        return [
            self._stack_values([regularizer.slope for regularizer in regularizers]),
            self._stack_values([regularizer.offset for regularizer in regularizers]),
        ]

    def _stack_values(self, values: Sequence[Tensor | float]) -> list[Tensor]:
        """(S, ...) for each parameter, or (S, 1, ...) if every site has one number for all parameters."""
        device = self.all_params[0].device
        if not any(isinstance(v, Tensor) for v in values):
            return [torch.tensor(values, device=device).view(-1, *(1 for _ in p.shape[1:])) for p in self.all_params]
        size = self.context.spec.num_parameters
        return self.context.spec.split_parameters(
            torch.stack([torch.as_tensor(v).expand(size) for v in values]).to(device)
        )


def gather_batch(
    context: TrainerContext, clients: Sequence[StackedClient], step: int, indices: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """x (S, B, ...), y (S, B) and example_weights (S, B), each example's weight in its site's mean loss.

    `indices`: the pool rows of each site's batch. Shorter batches are padded with examples of weight 0.
    """
    sizes = [len(i) for i in indices]
    S, B = len(indices), max(sizes)
    device = context.pool.device
    counts = torch.tensor(sizes).unsqueeze(1)
    example_weights = ((torch.arange(B) < counts) / counts).to(device)
    padded = [F.pad(i, (0, B - len(i)), value=int(i[0])) for i in indices] if min(sizes) < B else list(indices)
    index = torch.cat(padded)
    y = context.pool.labels(index).view(S, B)
    if context.config.augmentation.is_identity:
        x = context.pool.inputs(index)
    else:  # augmented per site, so that a site's augmentation does not depend on the other sites
        parts = [context.load_inputs(client.request, step, i) for client, i in zip(clients, indices, strict=True)]
        x = torch.cat([torch.cat([p, p[:1].expand(B - len(p), *p.shape[1:])]) for p in parts])
    class_weights = [client.class_weights for client in clients if client.class_weights is not None]
    if class_weights:
        example_weights = example_weights * torch.stack(class_weights).gather(1, y)
    return x.view(S, B, *x.shape[1:]), y, example_weights


def make_vmap_gradients(module: nn.Module, names: Sequence[str]) -> GradientFunction:
    """Gradients of any module, vectorized over the sites by `torch.func.vmap`. `names`: of its parameters."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor, example_weights: Tensor) -> Tensor:
        return (F.cross_entropy(functional_call(module, params, (x,)), y, reduction="none") * example_weights).sum()

    grad_and_value_by_client = vmap(grad_and_value(loss))

    def compute_losses_and_gradients(params: list[Tensor], x: Tensor, y: Tensor, example_weights: Tensor) -> Tensor:
        gradients, losses = grad_and_value_by_client(dict(zip(names, params, strict=True)), x, y, example_weights)
        for p, name in zip(params, names, strict=True):
            p.grad = gradients[name]
        out: Tensor = losses.detach()
        return out

    return compute_losses_and_gradients
