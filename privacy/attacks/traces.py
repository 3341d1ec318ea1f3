"""The trace that a canary leaves in what a coordinator sees: a score for each, the higher the likelier it was in.

`by_loss` has the models alone: how much a canary's loss fell from the first to the last. `by_gradient` has a site's
updates too, as a coordinator has without a secure sum: how much of a canary's own gradient is in each (white box,
Nasr et al. 2023, arXiv 2302.07956). Gradients of canaries resemble each other, so the update is explained by all of
them at once (least squares), and each gets its own part in units of its standard error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.weights import Snapshot, Spec, Vec
from privacy.attacks.canaries import Canaries, Score, Turns
from privacy.attacks.membership import losses

RIDGE = 0.01  # of a gradient's squared length: what two like canaries share is not blown up


def by_loss(module: nn.Module, canaries: Canaries, stats: Vec | None = None) -> Score:
    """`stats`: BatchNorm's running statistics, where the module has any."""
    put = _writer(module, stats)

    def mean(weights: Vec) -> Tensor:
        put(weights)
        return losses(module, canaries.x, canaries.y).view(canaries.m, canaries.per_unit).mean(1)

    def score(turns: Turns) -> Tensor:
        return mean(turns[0][0]) - mean(turns[-1][1])

    return score


def by_gradient(module: nn.Module, canaries: Canaries, stats: Vec | None = None, power: float = 1.0) -> Score:
    """`power`: gradients' entries are raised to it, with their sign; 1 suits plain descent, 1/2 Adam, which evens
    them out. Holds m x P floats."""
    put = _writer(module, stats)

    def score(turns: Turns) -> Tensor:
        total = torch.zeros(canaries.m, dtype=torch.float64)
        for before, after in turns:
            step = before - after
            if not step.any():
                continue
            put(before)
            directions = _directions(module, canaries, power)
            found = (directions @ (step / step.norm())).double()
            alike = (directions @ directions.T).double()
            apart = torch.linalg.inv(alike + RIDGE * torch.eye(canaries.m, dtype=torch.float64))
            total += (apart @ found) / apart.diagonal().sqrt()
        return total

    return score


def together(*scores: Score) -> Score:
    """The sum of scores in standard deviations: where one fails another may not."""

    def score(turns: Turns) -> Tensor:
        found = torch.stack([one(turns) for one in scores])
        return ((found - found.mean(1, keepdim=True)) / found.std(1, keepdim=True).clamp(min=1e-12)).sum(0)

    return score


def _directions(module: nn.Module, canaries: Canaries, power: float) -> Tensor:
    """(m, P): the units' gradients, of length 1."""
    module.eval()
    params = [p for p in module.parameters() if p.requires_grad]
    found = torch.empty(canaries.m, sum(p.numel() for p in params))
    pairs = zip(canaries.x.split(canaries.per_unit), canaries.y.split(canaries.per_unit), strict=True)
    for row, (x, y) in zip(found, pairs, strict=True):
        slopes = torch.autograd.grad(F.cross_entropy(module(x), y), params)
        flat = torch.cat([s.flatten() for s in slopes])
        row.copy_(F.normalize(flat.sign() * flat.abs() ** power if power != 1 else flat, dim=0))
    return found


def _writer(module: nn.Module, stats: Vec | None) -> Callable[[Vec], None]:
    spec = Spec.of(module)
    still = spec.read(module).stats.clone() if stats is None else stats
    return lambda weights: spec.write(module, Snapshot(weights, still))
