"""Canary audit: a lower bound of epsilon from one training run (Steinke, Nasr, Jagielski 2023, arXiv 2305.08846).

Each of m canaries (synthetic units) is included in the training or left out by a fair coin. Afterwards the canaries are
ranked by a score; the top ones are guessed to be included, the bottom ones left out. Under (epsilon, delta)-DP the
number of right ones among r guesses is bounded by Binomial(r, e^epsilon / (1 + e^epsilon)) (their Theorem 5.2), so
many right guesses refute small epsilons. The numbers of guesses are fixed beforehand; if several are tried, each is
tested at its share of the error probability (Bonferroni).

A bound of 0 proves nothing, because the canaries or the attack may be weak.
`CanaryAudit.max_epsilon_lower_bound` is the largest bound that the audit could have given.
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

from pipeline.core.errors import DataError
from pipeline.core.parameters import ModelState, ParameterSpec, ParamVector
from privacy.attacks.membership import compute_losses
from privacy.dpsgd.secure_rng import SecureRandom

RoundWeights = Sequence[tuple[ParamVector, ParamVector]]  # a site's weights before and after each round
TrainFunction = Callable[[Tensor], RoundWeights]  # argument (m,) bool: which canaries are included
ScoreFunction = Callable[[RoundWeights], Tensor]  # (m,): higher means more likely included
GUESS_FRACTIONS = (1 / 8, 1 / 4, 2 / 5)  # guessed on each side; at 1 / 2 the coins rarely allow all to be right
BLOCKS_PER_SIDE = 8  # across a canary's image


@dataclass(frozen=True)
class CanaryUnits:
    """`examples_per_unit` examples of each unit, one unit after the other."""

    x: Tensor  # (m * per_unit, *shape) from 0 to 1
    y: Tensor
    unit_index: Tensor  # 0 to m - 1
    examples_per_unit: int

    @property
    def num_units(self) -> int:
        return len(self.y) // self.examples_per_unit

    def included_rows(self, included: Tensor) -> Tensor:
        """Rows of the examples of the included canaries."""
        return included.repeat_interleave(self.examples_per_unit).nonzero().flatten()


def make_canaries(
    shape: Sequence[int], num_classes: int, num_units: int, examples_per_unit: int = 2, seed: int = 0
) -> CanaryUnits:
    """Images of random colour blocks; canaries are public, only the coins are secret.

    The labels of a unit increase from a random first label, so that the common gradient of a class cancels out and the
    gradients of the units differ.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_units * examples_per_unit, *shape, generator=generator)
    if len(shape) == 3:
        for dim in (2, 3):
            x = x.index_select(dim, torch.arange(shape[dim - 1]) * BLOCKS_PER_SIDE // shape[dim - 1])
    first_label = torch.randint(0, num_classes, (num_units, 1), generator=generator)
    y = (first_label + torch.arange(examples_per_unit)).remainder(num_classes).flatten()
    return CanaryUnits(x, y, torch.arange(num_units).repeat_interleave(examples_per_unit), examples_per_unit)


@dataclass(frozen=True)
class CanaryAudit:
    num_canaries: int
    num_guesses: int
    num_correct: int
    epsilon_lower_bound: float
    confidence: float
    delta: float
    max_epsilon_lower_bound: float  # the bound if every guess were right
    tried_num_guesses: tuple[int, ...]  # fixed beforehand
    scores: Tensor  # (m,)
    included: Tensor  # (m,) bool


def audit_canaries(
    train: TrainFunction,
    score: ScoreFunction,
    num_canaries: int,
    delta: float = 0.0,
    confidence: float = 0.95,
    guesses_per_side: Sequence[int] | None = None,
    secure_random: SecureRandom | None = None,
) -> CanaryAudit:
    """`guesses_per_side`: one number of guesses or several to try. `secure_random`: for tests only."""
    included = torch.zeros(num_canaries, dtype=torch.bool)
    included[(secure_random or SecureRandom()).poisson_sample(num_canaries, 0.5)] = True
    return evaluate_guesses(score(train(included)), included, delta, confidence, guesses_per_side)


def evaluate_guesses(
    scores: Tensor,
    included: Tensor,
    delta: float,
    confidence: float = 0.95,
    guesses_per_side: Sequence[int] | None = None,
) -> CanaryAudit:
    num_canaries, scores = len(included), scores.detach().cpu().double()
    if scores.shape != (num_canaries,) or not scores.isfinite().all():
        raise DataError(
            f"scores of shape {tuple(scores.shape)} for {num_canaries} canaries: give one finite number each"
        )
    tried_per_side = sorted(
        {max(1, int(share * num_canaries)) for share in GUESS_FRACTIONS}
        if guesses_per_side is None
        else set(guesses_per_side)
    )
    if not tried_per_side or tried_per_side[0] < 1 or 2 * tried_per_side[-1] > num_canaries:
        raise DataError(
            f"of {num_canaries} canaries {tried_per_side} cannot be guessed on each side; give numbers from 1 to "
            f"{num_canaries // 2}"
        )
    confidence_each = 1 - (1 - confidence) / len(tried_per_side)
    order = scores.argsort(stable=True)  # ties are ordered by index, which is independent of the coins
    guess_results = [(2 * k, int((~included[order[:k]]).sum() + included[order[-k:]].sum())) for k in tried_per_side]
    bounds = [epsilon_lower_bound(r, v, num_canaries, delta, confidence_each) for r, v in guess_results]
    best = max(range(len(guess_results)), key=lambda n: (bounds[n], guess_results[n][0]))
    max_bound = max(epsilon_lower_bound(r, r, num_canaries, delta, confidence_each) for r, _ in guess_results)
    tried_num_guesses = tuple(r for r, _ in guess_results)
    num_guesses, num_correct = guess_results[best]
    return CanaryAudit(
        num_canaries=num_canaries,
        num_guesses=num_guesses,
        num_correct=num_correct,
        epsilon_lower_bound=bounds[best],
        confidence=confidence,
        delta=delta,
        max_epsilon_lower_bound=max_bound,
        tried_num_guesses=tried_num_guesses,
        scores=scores,
        included=included,
    )


def epsilon_lower_bound(
    num_guesses: int, num_correct: int, num_canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest epsilon that this many right guesses refute at this confidence; 0 if they refute none."""
    if not 0 <= num_correct <= num_guesses <= num_canaries:
        raise DataError(
            f"{num_correct} right of {num_guesses} guesses about {num_canaries} canaries is impossible; check the counts"
        )
    significance = 1 - confidence
    if p_value(num_guesses, num_correct, num_canaries, 0.0, delta) >= significance:
        return 0.0
    low, high = 0.0, 1.0
    while high < 64 and p_value(num_guesses, num_correct, num_canaries, high, delta) < significance:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if p_value(num_guesses, num_correct, num_canaries, middle, delta) < significance
            else (low, middle)
        )
    return low


def p_value(num_guesses: int, num_correct: int, num_canaries: int, epsilon: float, delta: float) -> float:
    """Bound of the probability of `num_correct` = v or more right guesses under (epsilon, delta)-DP.

    P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i with binomial W.
    """
    success_probability = 1 / (1 + math.exp(-epsilon))
    if not num_correct:
        return 1.0
    tail = float(bdtrc(num_correct - 1, num_guesses, success_probability))
    if not delta:
        return tail
    i = np.arange(1, num_correct + 1)
    tail_gain = bdtrc(num_correct - 1 - i, num_guesses, success_probability) - tail
    return min(1.0, tail + 2 * num_canaries * delta * float((tail_gain / i).max()))


# Scores of canaries from what a coordinator sees; higher means more likely included.
#
# `loss_score` uses only the models: the decrease of a canary's loss from the first to the last one. `gradient_score` also
# uses a site's updates, which a coordinator has without secure aggregation: the part of a canary's gradient in each update
# (white box, Nasr et al. 2023, arXiv 2302.07956). Gradients of canaries are similar, so all of them are fitted to the
# update at once (least squares), and each coefficient is divided by its standard error.

GRAM_RIDGE = 0.01  # of a gradient's squared length; stabilizes the fit of similar canaries


def loss_score(module: nn.Module, canaries: CanaryUnits, stats: ParamVector | None = None) -> ScoreFunction:
    """`stats`: BatchNorm's running statistics, if the module has any."""
    write_weights = _weights_writer(module, stats)

    def mean_losses(weights: ParamVector) -> Tensor:
        write_weights(weights)
        return (
            compute_losses(module, canaries.x, canaries.y).view(canaries.num_units, canaries.examples_per_unit).mean(1)
        )

    def score(rounds: RoundWeights) -> Tensor:
        return mean_losses(rounds[0][0]) - mean_losses(rounds[-1][1])

    return score


def gradient_score(
    module: nn.Module, canaries: CanaryUnits, stats: ParamVector | None = None, power: float = 1.0
) -> ScoreFunction:
    """`power`: exponent of the gradients' absolute entries; 1 for SGD, 1/2 for Adam. Needs memory for m x P floats."""
    write_weights = _weights_writer(module, stats)

    def score(rounds: RoundWeights) -> Tensor:
        total = torch.zeros(canaries.num_units, dtype=torch.float64)
        for weights_before, weights_after in rounds:
            update = weights_before - weights_after
            if not update.any():
                continue
            write_weights(weights_before)
            directions = _gradient_directions(module, canaries, power)
            alignment = (directions @ (update / update.norm())).double()
            gram = (directions @ directions.T).double()
            gram_inverse = torch.linalg.inv(gram + GRAM_RIDGE * torch.eye(canaries.num_units, dtype=torch.float64))
            total += (gram_inverse @ alignment) / gram_inverse.diagonal().sqrt()
        return total

    return score


def combine_scores(*scores: ScoreFunction) -> ScoreFunction:
    """The sum of the standardized scores."""

    def score(rounds: RoundWeights) -> Tensor:
        stacked = torch.stack([score_function(rounds) for score_function in scores])
        return ((stacked - stacked.mean(1, keepdim=True)) / stacked.std(1, keepdim=True).clamp(min=1e-12)).sum(0)

    return score


def _gradient_directions(module: nn.Module, canaries: CanaryUnits, power: float) -> Tensor:
    """(m, P): the units' gradients with length 1."""
    module.eval()
    params = [p for p in module.parameters() if p.requires_grad]
    directions = torch.empty(canaries.num_units, sum(p.numel() for p in params))
    pairs = zip(canaries.x.split(canaries.examples_per_unit), canaries.y.split(canaries.examples_per_unit), strict=True)
    for row, (x, y) in zip(directions, pairs, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(module(x), y), params)
        flat = torch.cat([s.flatten() for s in gradients])
        row.copy_(F.normalize(flat.sign() * flat.abs() ** power if power != 1 else flat, dim=0))
    return directions


def _weights_writer(module: nn.Module, stats: ParamVector | None) -> Callable[[ParamVector], None]:
    spec = ParameterSpec.from_module(module)
    norm_stats = spec.read_state(module).norm_stats.clone() if stats is None else stats
    return lambda weights: spec.write_state(module, ModelState(weights, norm_stats))
