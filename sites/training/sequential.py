"""One site after the other with one module: the plain way, and what every other trainer has to agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import Refused
from pipeline.core.parameters import Snapshot, Vec
from pipeline.core.seeding import seed_of
from pipeline.protocol.tasks import (
    Activate,
    Activations,
    Evaluate,
    Evaluated,
    Fit,
    Fitted,
    Gradient,
    Profile,
    Pull,
    Result,
    Slope,
    Work,
)
from sites.training.base import Bench, Effort, Examples, Ticket, batches, halves
from sites.training.evaluation import CHUNK, evaluate
from sites.training.validation_profile import profile


class Loop:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.module = bench.make().to(bench.pool.device)
        self.params = [p for p in self.module.parameters() if p.requires_grad]
        self.drops = has_dropout(self.module)

    def run(self, tickets: Sequence[Ticket]) -> list[Result]:
        return [self.one(ticket) for ticket in tickets]

    def one(self, ticket: Ticket) -> Result:
        examples = self.bench.holds(ticket)
        if not len(examples.train) and not isinstance(ticket.job, Evaluate | Profile):
            raise Refused(
                f"{ticket.site} has no training examples for this; public.share or public.data give the coordinator some"
            )
        match ticket.job:
            case Fit():
                return self.fit(ticket, ticket.job, examples)
            case Gradient(at, stats):
                self.load(at, stats)
                gradient, loss = self.gradient(examples.train)
                steps = Effort.of(Fit(at, epochs=1), examples, self.bench.recipe).asked
                return Slope(gradient.cpu(), Work(steps, steps, examples.n), loss)
            case Evaluate(weights, split, stats):
                self.load(weights, stats)
                return self.evaluate(getattr(examples, split))
            case Profile(weights, split, stats):
                self.load(weights, stats)
                return profile(self.module, self.bench.pool, getattr(examples, split), self.bench.classes, ticket.job)
            case Activate(weights, stats, count):
                self.load(weights, stats)
                return activations(self.module, self.bench.pool.inputs(examples.train[:count]))

    def fit(self, ticket: Ticket, job: Fit, examples: Examples) -> Fitted:
        bench, recipe = self.bench, self.bench.recipe
        effort = Effort.of(job, examples, recipe)
        self.load(job.start, job.stats)
        lr = recipe.rate(job, ticket.turn)
        optimiser = recipe.make([self.params[n] for n in bench.moving(job)], lr)
        pull = pulling(bench, self.params, job.pull)
        asked, done, spent = effort.asked, 0, 0
        losses = torch.zeros((), device=bench.pool.device)
        if job.gamma is not None and effort.todo:
            goal = job.gamma * self.norm(examples.train, job.pull)
            spent = effort.per_epoch  # looking at all local data is work too, and a deadline counts it
        self.module.train()
        if self.drops:
            torch.manual_seed(seed_of(bench.seed, ticket.site, ticket.turn, ticket.nth, "dropout"))
        weights = bench.weights(examples.train)
        for step, index in enumerate(batches(bench, ticket, effort)):
            if job.cap is not None and spent >= job.cap:
                break
            loss = self.descend(ticket, job.ahead, step, index, weights)
            for p, slope, offset in pull:
                p.grad.add_(slope * p.detach() + offset)  # type: ignore[union-attr]
            optimiser.step()
            losses += loss
            done, spent = done + 1, spent + 1
            if job.gamma is not None and done % effort.per_epoch == 0 and done < asked:
                if self.norm(examples.train, job.pull) <= goal:
                    asked = done
                    break
                spent += effort.per_epoch
                self.module.train()
        after = bench.spec.read(self.module)
        stats = after.stats if bench.moves(job, "norm") else job.stats
        travel = lr * done if recipe.plain else None
        work = Work(asked, done, effort.n, looks=spent - done)
        return Fitted(after.weights.cpu(), stats.cpu(), work, float(losses) / max(done, 1), travel)

    def descend(self, ticket: Ticket, ahead: float, step: int, index: Tensor, weights: Tensor | None) -> Tensor:
        """The gradient in `.grad`, and the loss. `ahead`: at w - ahead * gradient of the batch's first half."""
        if not ahead:
            return self.backward(self.bench.batch(ticket, step, index), index, weights)
        first, second = halves(index)
        self.backward(self.bench.batch(ticket, 2 * step, first), first, weights)
        before = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            for p in self.params:
                p.sub_(ahead * p.grad)  # type: ignore[operator]
        loss = self.backward(self.bench.batch(ticket, 2 * step + 1, second), second, weights)
        with torch.no_grad():
            for p, value in zip(self.params, before, strict=True):
                p.copy_(value)
        return loss

    def backward(self, x: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
        for p in self.params:
            p.grad = None
        loss = losses_of(self.module(x), self.bench.pool.labels(index), weights).mean()
        loss.backward()
        return loss.detach()

    def load(self, weights: Vec, stats: Vec) -> None:
        self.bench.spec.write(self.module, Snapshot(weights, stats))

    def gradient(self, index: Tensor) -> tuple[Vec, float]:
        """Of the mean loss over `index`, in chunks; and that loss. In eval mode: no statistics move."""
        weights = self.bench.weights(index)
        self.module.eval()
        self.module.zero_grad()
        total = torch.zeros((), device=self.bench.pool.device)
        for part in index.split(CHUNK):
            logits = self.module(self.bench.pool.inputs(part))
            loss = losses_of(logits, self.bench.pool.labels(part), weights).sum() / len(index)
            loss.backward()
            total += loss.detach()
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.params]
        return torch.cat(flat), float(total)

    def norm(self, index: Tensor, pull: Pull) -> float:
        """|grad h|, pull included."""
        gradient, _ = self.gradient(index)
        w = self.bench.spec.read(self.module).weights
        if not pull.absent:
            gradient = gradient + (pull.slope * w.cpu() + pull.offset).to(gradient.device)
        self.module.zero_grad()
        return math.sqrt(float((gradient.cpu().double() ** 2).sum()))

    def evaluate(self, index: Tensor) -> Evaluated:
        return evaluate(self.module, self.bench.pool, index, self.bench.classes)


def pulling(
    bench: Bench, params: Sequence[nn.Parameter], pull: Pull
) -> list[tuple[nn.Parameter, Tensor | float, Tensor | float]]:
    """(parameter, slope, offset) of every parameter; empty without a pull."""
    if pull.absent:
        return []
    parts = [
        bench.spec.split(v.to(bench.pool.device)) if isinstance(v, Tensor) else [v] * len(params)
        for v in (pull.slope, pull.offset)
    ]
    return list(zip(params, *parts, strict=True))


def activations(module: nn.Module, x: Tensor) -> Activations:
    """Outputs of the layers with weights on the inputs x."""
    seen: list[Tensor] = []
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    hooks = [m.register_forward_hook(lambda _, __, out: seen.append(out.flatten(1).cpu())) for m in layers]
    try:
        module.eval()
        with torch.inference_mode():
            module(x)
    finally:
        for hook in hooks:
            hook.remove()
    return Activations(x.flatten(1).cpu().clone(), tuple(out.clone() for out in seen))


def losses_of(logits: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """(B,)"""
    losses = F.cross_entropy(logits, y, reduction="none")
    return losses if weights is None else losses * weights.index_select(0, y)


def has_dropout(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
