"""The reference trainer: one site after the other with one module. All other trainers must agree with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.parameters import ModelState, ParamVector
from pipeline.core.seeding import derive_seed
from pipeline.protocol.tasks import (
    ActivationsJob,
    ActivationsResult,
    EvaluateJob,
    EvaluationSums,
    GradientJob,
    GradientResult,
    JobResult,
    LocalRegularizer,
    LocalWork,
    ProfileJob,
    TrainJob,
    TrainResult,
)
from sites.data.pool import SplitIndices
from sites.training.base import StepBudget, TrainerContext, TrainRequest, iterate_batches, split_in_halves
from sites.training.evaluation import EXAMPLES_PER_PASS, evaluate
from sites.training.validation_profile import compute_profile


class SequentialTrainer:
    def __init__(self, context: TrainerContext) -> None:
        self.context = context
        self.module = context.make_model().to(context.pool.device)
        self.params = [p for p in self.module.parameters() if p.requires_grad]
        self.has_dropout = has_dropout(self.module)

    def run(self, requests: Sequence[TrainRequest]) -> list[JobResult]:
        return [self.run_request(request) for request in requests]

    def run_request(self, request: TrainRequest) -> JobResult:
        indices = self.context.indices_for(request)
        if not len(indices.train) and not isinstance(request.job, EvaluateJob | ProfileJob):
            raise IncompatibleStudyError(
                f"{request.site} has no examples to train on; set public.fraction or public.data for public examples"
            )
        match request.job:
            case TrainJob():
                return self.train(request, request.job, indices)
            case GradientJob(gradient_weights, stats):
                self.load_model(gradient_weights, stats)
                gradient, loss = self.full_gradient(indices.train)
                steps = StepBudget.from_job(
                    TrainJob(gradient_weights, epochs=1), indices, self.context.config
                ).steps_requested
                return GradientResult(gradient.cpu(), LocalWork(steps, steps, indices.num_examples), loss)
            case EvaluateJob(weights, split, stats):
                self.load_model(weights, stats)
                return self.evaluate(getattr(indices, split))
            case ProfileJob(weights, split, stats):
                self.load_model(weights, stats)
                return compute_profile(
                    self.module, self.context.pool, getattr(indices, split), self.context.num_classes, request.job
                )
            case ActivationsJob(weights, stats, count):
                self.load_model(weights, stats)
                return compute_activations(self.module, self.context.pool.inputs(indices.train[:count]))

    def train(self, request: TrainRequest, job: TrainJob, indices: SplitIndices) -> TrainResult:
        """Local SGD with the job's regularizer; with `job.inexactness` until the gradient is small enough (FedProx)."""
        context, config = self.context, self.context.config
        budget = StepBudget.from_job(job, indices, config)
        self.load_model(job.initial_weights, job.norm_stats)
        lr = config.learning_rate(job, request.round)
        optimizer = config.make_optimizer([self.params[n] for n in context.trainable_positions(job)], lr)
        regularizer_terms = split_regularizer(context, self.params, job.regularizer)
        steps_requested = budget.steps_requested
        steps_done, steps_spent = 0, 0
        loss_sum = torch.zeros((), device=context.pool.device)
        if job.inexactness is not None and budget.steps_allowed:
            max_gradient_norm = job.inexactness * self.gradient_norm(indices.train, job.regularizer)
            steps_spent = budget.steps_per_epoch  # a full gradient costs as much as an epoch, and deadlines count it
        self.module.train()
        if self.has_dropout:
            torch.manual_seed(derive_seed(context.seed, request.site, request.round, request.job_index, "dropout"))
        class_weights = context.class_weights(indices.train)
        for step, index in enumerate(iterate_batches(context, request, budget)):
            if job.max_steps is not None and steps_spent >= job.max_steps:
                break
            loss = self.compute_gradient(request, job.maml_lr, step, index, class_weights)
            for p, slope, offset in regularizer_terms:
                p.grad.add_(slope * p.detach() + offset)  # type: ignore[union-attr]
            optimizer.step()
            loss_sum += loss
            steps_done += 1
            steps_spent += 1
            is_epoch_end = steps_done % budget.steps_per_epoch == 0
            if job.inexactness is not None and is_epoch_end and steps_done < steps_requested:
                if self.gradient_norm(indices.train, job.regularizer) <= max_gradient_norm:
                    steps_requested = steps_done
                    break
                steps_spent += budget.steps_per_epoch
                self.module.train()
        final_state = context.spec.read_state(self.module)
        stats = final_state.norm_stats if context.is_trainable(job, "norm") else job.norm_stats
        lr_sum = lr * steps_done if config.is_plain_sgd else None
        work = LocalWork(steps_requested, steps_done, budget.num_examples, eval_steps=steps_spent - steps_done)
        return TrainResult(final_state.weights.cpu(), stats.cpu(), work, float(loss_sum) / max(steps_done, 1), lr_sum)

    def compute_gradient(
        self, request: TrainRequest, maml_lr: float, step: int, index: Tensor, class_weights: Tensor | None
    ) -> Tensor:
        """Writes the batch's gradient to `.grad` and returns the loss ().

        With `maml_lr`, first-order MAML: the gradient of the batch's second half at w - maml_lr * (that of the first).
        """
        if not maml_lr:
            return self.backward(self.context.load_inputs(request, step, index), index, class_weights)
        first, second = split_in_halves(index)
        self.backward(self.context.load_inputs(request, 2 * step, first), first, class_weights)
        saved_values = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            for p in self.params:
                p.sub_(maml_lr * p.grad)  # type: ignore[operator]
        loss = self.backward(self.context.load_inputs(request, 2 * step + 1, second), second, class_weights)
        with torch.no_grad():
            for p, value in zip(self.params, saved_values, strict=True):
                p.copy_(value)
        return loss

    def backward(self, x: Tensor, index: Tensor, class_weights: Tensor | None) -> Tensor:
        for p in self.params:
            p.grad = None
        loss = example_losses(self.module(x), self.context.pool.labels(index), class_weights).mean()
        loss.backward()
        return loss.detach()

    def load_model(self, weights: ParamVector, stats: ParamVector) -> None:
        self.context.spec.write_state(self.module, ModelState(weights, stats))

    def full_gradient(self, index: Tensor) -> tuple[ParamVector, float]:
        """The gradient (P,) of the mean loss over these pool rows, in eval mode, and this loss."""
        class_weights = self.context.class_weights(index)
        self.module.eval()
        self.module.zero_grad()
        loss_sum = torch.zeros((), device=self.context.pool.device)
        for part in index.split(EXAMPLES_PER_PASS):
            logits = self.module(self.context.pool.inputs(part))
            loss = example_losses(logits, self.context.pool.labels(part), class_weights).sum() / len(index)
            loss.backward()
            loss_sum += loss.detach()
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.params]
        return torch.cat(flat), float(loss_sum)

    def gradient_norm(self, index: Tensor, regularizer: LocalRegularizer) -> float:
        """The 2-norm of the gradient of the local objective, regularizer included."""
        gradient, _ = self.full_gradient(index)
        w = self.context.spec.read_state(self.module).weights
        if not regularizer.is_zero:
            gradient = gradient + (regularizer.slope * w.cpu() + regularizer.offset).to(gradient.device)
        self.module.zero_grad()
        return math.sqrt(float((gradient.cpu().double() ** 2).sum()))

    def evaluate(self, index: Tensor) -> EvaluationSums:
        return evaluate(self.module, self.context.pool, index, self.context.num_classes)


def split_regularizer(
    context: TrainerContext, params: Sequence[nn.Parameter], regularizer: LocalRegularizer
) -> list[tuple[nn.Parameter, Tensor | float, Tensor | float]]:
    """(parameter, slope, offset) for every parameter; empty without a regularizer."""
    if regularizer.is_zero:
        return []
    parts = [
        context.spec.split_parameters(v.to(context.pool.device)) if isinstance(v, Tensor) else [v] * len(params)
        for v in (regularizer.slope, regularizer.offset)
    ]
    return list(zip(params, *parts, strict=True))


def compute_activations(module: nn.Module, x: Tensor) -> ActivationsResult:
    """Outputs of all linear and convolutional layers on the inputs x (n, ...), each flattened to (n, p)."""
    outputs: list[Tensor] = []
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    hooks = [m.register_forward_hook(lambda _, __, out: outputs.append(out.flatten(1).cpu())) for m in layers]
    try:
        module.eval()
        with torch.inference_mode():
            module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return ActivationsResult(x.flatten(1).cpu().clone(), tuple(out.clone() for out in outputs))


def example_losses(logits: Tensor, y: Tensor, class_weights: Tensor | None) -> Tensor:
    """(B,) cross-entropy of each example, times the weight of its class. logits: (B, C)."""
    losses = F.cross_entropy(logits, y, reduction="none")
    return losses if class_weights is None else losses * class_weights.index_select(0, y)


def has_dropout(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
