"""DP-SGD with Opacus: units drawn at random, their gradients clipped and noised; then the pull, which knows no data.

Only work whose result leaves the site is private: training in a `train` task. What is trained to be judged or kept at
the site, or on public examples, is done by the plain loop.

Two data sets are neighbours if one has a unit more. A unit's gradient may then depend on nothing but this unit, the
model, and dice that are thrown anew for each unit: augmentation and dropout draw from Entropy, because with the study's
seeds a unit's augmentation would depend on who stands before it in the batch. What the terms were worked out from, the
number of units and examples when the plan was made, counts as public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.core.errors import Refused
from pipeline.core.parameters import Snapshot
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Fit, Fitted, Result
from privacy.dpsgd.secure_rng import Entropy
from sites.training.base import Bench, Effort, Examples, Ticket
from sites.training.sequential import Loop, pulling
from sites.training.unit_clipping import WAYS, Mode, Sight, Terms


class Private:
    def __init__(
        self, bench: Bench, terms: Mapping[SiteId, Terms], mode: Mode, entropy: Callable[[], Entropy] = Entropy
    ) -> None:
        self.bench, self.terms, self.entropy = bench, terms, entropy
        self.loop = Loop(bench)
        self.drops = self.loop.drops
        self.clipping = WAYS[mode](bench)
        self._units: dict[SiteId, list[Tensor]] = {}

    def run(self, tickets: Sequence[Ticket]) -> list[Result]:
        return [self.one(ticket) for ticket in tickets]

    def one(self, ticket: Ticket) -> Result:
        job = ticket.job
        if not ticket.private:
            return self.loop.one(ticket)
        if not isinstance(job, Fit) or job.gamma is not None or job.ahead:
            raise Refused(f"{ticket.site}: {type(job).__name__} has no privacy mechanism; use another strategy")
        return self.fit(ticket, job, self.bench.holds(ticket), self.terms[ticket.site])

    def fit(self, ticket: Ticket, job: Fit, examples: Examples, terms: Terms) -> Fitted:
        bench, recipe, clipping, entropy = self.bench, self.bench.recipe, self.clipping, self.entropy()
        effort = Effort.of(job, examples, recipe)
        units = self._of(ticket.site, examples.train)
        bench.spec.write(clipping.module, Snapshot(job.start, job.stats))
        clipping.move(bench.moving(job))
        lr = recipe.rate(job, ticket.turn)
        inner = recipe.optim(clipping.moving, lr)
        optimiser = clipping.optimiser(inner, entropy, terms)
        moves = {id(p) for p in clipping.moving}
        pull = [part for part in pulling(bench, clipping.params, job.pull) if id(part[0]) in moves]
        sight = Sight(bench, entropy, bench.public_weights, terms.scale)
        clipping.module.train()
        if self.drops:
            torch.manual_seed(entropy.generator().initial_seed())
        loss, seen = 0.0, 0
        for _ in range(effort.todo):
            drawn = [units[place] for place in entropy.chosen(len(units), terms.rate).tolist()]
            loss += clipping.mean_of(drawn, sight, optimiser)
            seen += sum(map(len, drawn))
            for p, slope, offset in pull:  # after clipping and noise: Opacus writes p.grad anew
                p.grad.add_(slope * p.detach() + offset)  # type: ignore[union-attr]
            inner.step()
            optimiser.zero_grad(True)
        clipping.restore()
        weights = bench.spec.read(clipping.module).weights.cpu()
        travel = lr * effort.todo if recipe.plain else None
        return Fitted(weights, job.stats, effort.work(effort.todo), loss / max(seen, 1), travel)

    def _of(self, site: SiteId, train: Tensor) -> list[Tensor]:
        """The site's training rows by unit, made once."""
        if site not in self._units:
            one_each = self.terms[site].unit == "example"
            self._units[site] = by_unit(train, None if one_each else self.bench.pool.unit)
        return self._units[site]


def by_unit(train: Tensor, unit: Tensor | None) -> list[Tensor]:
    """Each unit's rows of the pool; every example its own where there are no units."""
    if unit is None:
        return list(train.split(1))
    owner = np.unique(unit[train].cpu().numpy(), return_inverse=True)[1]
    order = torch.from_numpy(np.argsort(owner, kind="stable")).to(train.device)
    return list(train[order].split(np.bincount(owner).tolist()))
