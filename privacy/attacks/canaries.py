"""A lower bound on epsilon from one training run (Steinke, Nasr, Jagielski 2023, arXiv 2305.08846).

Each of m canaries, made-up units that are no patient's, is trained on or left out by a fair coin. Afterwards the
canaries are ranked by a score; those on top are guessed to be in, those at the bottom out. Under (epsilon, delta)-DP
the right ones among r guesses are hardly more than Binomial(r, e^epsilon / (1 + e^epsilon)) has (their Theorem 5.2),
so many right guesses refute small epsilons. How many to guess is settled before: where several numbers are tried, each
is tested at its share of the error (Bonferroni).

A bound of 0 proves nothing: the canaries or the attack may be weak. `Audit.most` says what the audit could have shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import bdtrc
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import BadData
from pipeline.core.parameters import Snapshot, Spec, Vec
from privacy.attacks.membership import losses
from privacy.dpsgd.secure_rng import Entropy

Turns = Sequence[tuple[Vec, Vec]]  # a site's weights before and after each of its turns
Train = Callable[[Tensor], Turns]  # given (m,) bool: which canaries are in
Score = Callable[[Turns], Tensor]  # (m,): the higher, the likelier in
SHARES = (1 / 8, 1 / 4, 2 / 5)  # of the canaries guessed in, and as many out; coins seldom let 1 / 2 be right
BLOCKS = 8  # across a canary's image


@dataclass(frozen=True)
class Canaries:
    """`per_unit` examples of each, one unit after the other."""

    x: Tensor  # (m * per_unit, *shape) from 0 to 1
    y: Tensor
    unit: Tensor  # 0 to m - 1
    per_unit: int

    @property
    def m(self) -> int:
        return len(self.y) // self.per_unit

    def rows(self, included: Tensor) -> Tensor:
        """Examples of the canaries that are in."""
        return included.repeat_interleave(self.per_unit).nonzero().flatten()


def make_canaries(shape: Sequence[int], classes: int, count: int, per_unit: int = 2, seed: int = 0) -> Canaries:
    """Patterns of random colours, like nobody's. A unit's labels take turns from a random one on: what all examples of
    a class share cancels out, and the units' gradients differ. Canaries are no secret; the coins are."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.rand(count * per_unit, *shape, generator=dice)
    if len(shape) == 3:
        for side in (2, 3):
            x = x.index_select(side, torch.arange(shape[side - 1]) * BLOCKS // shape[side - 1])
    first = torch.randint(0, classes, (count, 1), generator=dice)
    y = (first + torch.arange(per_unit)).remainder(classes).flatten()
    return Canaries(x, y, torch.arange(count).repeat_interleave(per_unit), per_unit)


@dataclass(frozen=True)
class Audit:
    m: int
    guesses: int
    correct: int
    epsilon_low: float
    confidence: float
    delta: float
    most: float  # the bound that this many canaries could have given, had every guess been right
    tried: tuple[int, ...]  # numbers of guesses, fixed beforehand
    scores: Tensor  # (m,)
    included: Tensor  # (m,) bool


def audit(
    train: Train,
    score: Score,
    m: int,
    delta: float = 0.0,
    confidence: float = 0.95,
    sides: Sequence[int] | None = None,
    entropy: Entropy | None = None,
) -> Audit:
    """`sides`: how many are guessed on each side; one number, or several to try. Only a test may give `entropy`."""
    included = torch.zeros(m, dtype=torch.bool)
    included[(entropy or Entropy()).chosen(m, 0.5)] = True
    return judge(score(train(included)), included, delta, confidence, sides)


def judge(
    scores: Tensor, included: Tensor, delta: float, confidence: float = 0.95, sides: Sequence[int] | None = None
) -> Audit:
    m, scores = len(included), scores.detach().cpu().double()
    if scores.shape != (m,) or not scores.isfinite().all():
        raise BadData(f"scores of shape {tuple(scores.shape)} for {m} canaries: one finite number each is due")
    tried = sorted({max(1, int(share * m)) for share in SHARES} if sides is None else set(sides))
    if not tried or tried[0] < 1 or 2 * tried[-1] > m:
        raise BadData(f"of {m} canaries {tried} cannot be guessed on each side; give numbers from 1 to {m // 2}")
    each = 1 - (1 - confidence) / len(tried)
    order = scores.argsort(stable=True)  # by place where scores tie, of which the coins know nothing
    found = [(2 * k, int((~included[order[:k]]).sum() + included[order[-k:]].sum())) for k in tried]
    bounds = [lower_bound(r, v, m, delta, each) for r, v in found]
    best = max(range(len(found)), key=lambda n: (bounds[n], found[n][0]))
    most = max(lower_bound(r, r, m, delta, each) for r, _ in found)
    asked = tuple(r for r, _ in found)
    return Audit(m, *found[best], bounds[best], confidence, delta, most, asked, scores, included)


def lower_bound(guesses: int, correct: int, m: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that so many right guesses refute at this confidence; 0 if they refute none."""
    if not 0 <= correct <= guesses <= m:
        raise BadData(f"{correct} right of {guesses} guesses about {m} canaries cannot be; count them again")
    level = 1 - confidence
    if p_value(guesses, correct, m, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, 1.0
    while high < 64 and p_value(guesses, correct, m, high, delta) < level:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(guesses, correct, m, middle, delta) < level else (low, middle)
    return low


def p_value(guesses: int, correct: int, m: int, epsilon: float, delta: float) -> float:
    """The chance of v or more right guesses under (epsilon, delta)-DP is at most the binomial tail
    P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i."""
    chance = 1 / (1 + math.exp(-epsilon))
    if not correct:
        return 1.0
    tail = float(bdtrc(correct - 1, guesses, chance))
    if not delta:
        return tail
    i = np.arange(1, correct + 1)
    within = bdtrc(correct - 1 - i, guesses, chance) - tail
    return min(1.0, tail + 2 * m * delta * float((within / i).max()))


# The trace that a canary leaves in what a coordinator sees: a score for each, the higher the likelier it was in.
#
# `by_loss` has the models alone: how much a canary's loss fell from the first to the last. `by_gradient` has a site's
# updates too, as a coordinator has without a secure sum: how much of a canary's own gradient is in each (white box,
# Nasr et al. 2023, arXiv 2302.07956). Gradients of canaries resemble each other, so the update is explained by all of
# them at once (least squares), and each gets its own part in units of its standard error.

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
