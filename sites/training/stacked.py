"""All sites at once: parameters (S, ...), batches (S, B, ...), one step for everybody.

Gradients come from `torch.func` over the module, or, for chains of dense layers, from `chain.py`, which is twice as
fast. Sites are sorted by their number of steps, so that those still at work are a prefix of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from pipeline.core.errors import Refused
from pipeline.protocol.tasks import Fit, Fitted, Result
from sites.training.base import Bench, Descent, Effort, Ticket, batches, halves
from sites.training.sequential import Loop
from sites.training.stacked_mlp import Chain

# params [(S, ...)], x (S, B, ...), y (S, B), share (S, B) -> loss (S,); the gradients are written to `.grad`
Differentiate = Callable[[list[Tensor], Tensor, Tensor, Tensor], Tensor]


class Stacked:
    """What cannot be stacked (gamma's stopping rule, evaluation) is done by the loop.

    The stack is cut into one part a core, each on a thread of its own with one operator thread: parts wait for each
    other once a Fit, where operator threads would wait after every operator, and for long if other programs are busy.
    """

    def __init__(self, bench: Bench, workers: int = 1) -> None:
        self.bench = bench
        self.loop = Loop(bench)
        if bench.spec.stat_size or self.loop.drops:
            raise Refused("trainer = 'stacked' takes no BatchNorm and no dropout; use trainer = 'loop'")
        chain = Chain.of(self.loop.module)
        self.differentiate: Differentiate = chain if chain else by_vmap(self.loop.module, bench.spec.names)
        self.workers = (
            workers if chain else 1
        )  # functional_call swaps the parameters of a module that threads would share
        self._threads = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, tickets: Sequence[Ticket]) -> list[Result]:
        alike: dict[object, list[int]] = {}  # what can take one step together
        for i, t in enumerate(tickets):
            if isinstance(t.job, Fit) and t.job.gamma is None:
                rate = self.bench.recipe.rate(t.job, t.turn)
                alike.setdefault((t.job.trains, t.job.data, t.job.ahead, rate), []).append(i)
        parts = [group[worker :: self.workers] for group in alike.values() for worker in range(self.workers)]
        stacks = [[tickets[i] for i in part] for part in parts]
        done = map(self.fit, stacks) if self.workers == 1 else self._threads.map(self.fit, stacks)
        results: dict[int, Result] = {}
        for part, fits in zip(parts, done, strict=True):
            results.update(zip(part, fits, strict=True))
        return [results[i] if i in results else self.loop.one(t) for i, t in enumerate(tickets)]

    def fit(self, tickets: Sequence[Ticket]) -> list[Fitted]:
        if not tickets:
            return []
        bench, device = self.bench, self.bench.pool.device
        rows = sorted((Row.of(bench, t, place) for place, t in enumerate(tickets)), key=lambda r: -r.effort.todo)
        flat = torch.stack([r.job.start for r in rows]).to(device)
        params = [p.clone() for p in bench.spec.split(flat)]
        stack = Stack(bench, rows, params)
        losses = torch.zeros(len(rows), device=device)
        done, active = 0, len(rows)
        while active := sum(r.effort.todo > done for r in rows[:active]):
            stack.narrow(active)
            losses[:active] += self.descend(stack.params, rows[:active], done)
            stack.step()
            done += 1
        after = torch.cat([p.reshape(len(rows), -1) for p in params], 1).cpu()
        fits = [row.fitted(w, float(loss)) for row, w, loss in zip(rows, after, losses.cpu(), strict=True)]
        return [fit for _, fit in sorted(zip((r.place for r in rows), fits, strict=True), key=lambda pair: pair[0])]

    def descend(self, params: list[Tensor], rows: Sequence[Row], step: int) -> Tensor:
        """Gradients in `.grad`, and the losses (S,). `ahead`: gradients at w - ahead * those of the batch's first half."""
        index, ahead = [next(row.batches) for row in rows], rows[0].job.ahead
        if not ahead:
            return self.differentiate(params, *gather(self.bench, rows, step, index))
        first, second = zip(*map(halves, index), strict=True)
        self.differentiate(params, *gather(self.bench, rows, 2 * step, first))
        there = [p - ahead * p.grad for p in params]  # type: ignore[operator]
        loss = self.differentiate(there, *gather(self.bench, rows, 2 * step + 1, second))
        for p, q in zip(params, there, strict=True):
            p.grad = q.grad
        return loss


@dataclass(frozen=True)
class Row:
    place: int
    ticket: Ticket
    job: Fit
    effort: Effort
    batches: Iterator[Tensor]
    lr: float
    plain: bool
    weights: Tensor | None  # (C,) of the classes in the loss

    @classmethod
    def of(cls, bench: Bench, ticket: Ticket, place: int) -> Row:
        assert isinstance(ticket.job, Fit)
        held = bench.holds(ticket)
        effort = Effort.of(ticket.job, held, bench.recipe)
        lr = bench.recipe.rate(ticket.job, ticket.turn)
        return cls(
            place,
            ticket,
            ticket.job,
            effort,
            batches(bench, ticket, effort),
            lr,
            bench.recipe.plain,
            bench.weights(held.train),
        )

    def fitted(self, weights: Tensor, losses: float) -> Fitted:
        done = self.effort.todo
        work = self.effort.work(done)
        return Fitted(
            weights.clone(), self.job.stats, work, losses / max(done, 1), self.lr * done if self.plain else None
        )


class Stack:
    """The prefix of sites still at work: views of the parameters, their pulls and their optimiser."""

    def __init__(self, bench: Bench, rows: Sequence[Row], params: list[Tensor]) -> None:
        self.bench, self.rows, self.all = bench, rows, params
        self.params: list[Tensor] = []
        self.optimiser: torch.optim.Optimizer | Descent | None = None
        self.pull = self._pull()

    def narrow(self, active: int) -> None:
        if self.params and len(self.params[0]) == active:
            return
        before, self.params = self.params, [p[:active] for p in self.all]
        moving = self.bench.moving(self.rows[0].job)
        optimiser = self.bench.recipe.make([self.params[n] for n in moving], self.rows[0].lr)
        if self.optimiser is not None:  # keep the momenta of those who go on
            for old, new in zip(before, self.params, strict=True):
                state = self.optimiser.state.get(old, {})
                optimiser.state[new] = {k: v[:active] if v.dim() else v for k, v in state.items() if v is not None}
        self.optimiser = optimiser

    def step(self) -> None:
        assert self.optimiser is not None
        active = len(self.params[0])
        for p, slope, offset in zip(self.params, *self.pull, strict=True) if self.pull else ():
            p.grad.addcmul_(slope[:active], p).add_(offset[:active])
        self.optimiser.step()

    def _pull(self) -> list[list[Tensor]]:
        """[slopes, offsets], each [(S, ...)] by parameter; empty where nobody is pulled."""
        pulls = [r.job.pull for r in self.rows]
        if all(p.absent for p in pulls):
            return []
        return [self._stacked([p.slope for p in pulls]), self._stacked([p.offset for p in pulls])]

    def _stacked(self, values: Sequence[Tensor | float]) -> list[Tensor]:
        """(S, ...) by parameter, or (S, 1, ...) where every site has one number for all."""
        device = self.all[0].device
        if not any(isinstance(v, Tensor) for v in values):
            return [torch.tensor(values, device=device).view(-1, *(1 for _ in p.shape[1:])) for p in self.all]
        size = self.bench.spec.size
        return self.bench.spec.split(torch.stack([torch.as_tensor(v).expand(size) for v in values]).to(device))


def gather(bench: Bench, rows: Sequence[Row], step: int, indices: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """x (S, B, ...), y (S, B) and each example's share of its site's mean loss; short batches are padded with share 0."""
    sizes = [len(i) for i in indices]
    S, B = len(indices), max(sizes)
    device = bench.pool.device
    counts = torch.tensor(sizes).unsqueeze(1)
    share = ((torch.arange(B) < counts) / counts).to(device)
    padded = [F.pad(i, (0, B - len(i)), value=int(i[0])) for i in indices] if min(sizes) < B else list(indices)
    index = torch.cat(padded)
    y = bench.pool.labels(index).view(S, B)
    if bench.recipe.augment.absent:
        x = bench.pool.inputs(index)
    else:  # each site's batch by itself, so that what it draws does not depend on the others
        parts = [bench.batch(r.ticket, step, i) for r, i in zip(rows, indices, strict=True)]
        x = torch.cat([torch.cat([p, p[:1].expand(B - len(p), *p.shape[1:])]) for p in parts])
    weights = [r.weights for r in rows if r.weights is not None]
    if weights:
        share = share * torch.stack(weights).gather(1, y)
    return x.view(S, B, *x.shape[1:]), y, share


def by_vmap(module: nn.Module, names: Sequence[str]) -> Differentiate:
    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        return (F.cross_entropy(functional_call(module, params, (x,)), y, reduction="none") * share).sum()

    each = vmap(grad_and_value(loss))

    def differentiate(params: list[Tensor], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        gradients, losses = each(dict(zip(names, params, strict=True)), x, y, share)
        for p, name in zip(params, names, strict=True):
            p.grad = gradients[name]
        out: Tensor = losses.detach()
        return out

    return differentiate
