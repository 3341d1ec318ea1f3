"""What (epsilon, delta) means for a person: how far a belief can move, how well anybody can guess, what groups get.

With D and D' data that differ by one unit, Pr[D gives S] <= e^epsilon Pr[D' gives S] + delta for every set S of outcomes.
Guessing which of both it was, at a rate `alarm` of false alarms, then succeeds at most at the rate `detection` (Kairouz
et al. 2015, arXiv 1311.0776). Groups of k units get (k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1)).
"""

from __future__ import annotations

import math


def factor(epsilon: float) -> float:
    """By which the odds of any statement about a unit can change."""
    return math.exp(epsilon) if epsilon < 700 else math.inf


def belief(before: float, epsilon: float) -> float:
    """The most that `before` can become; delta aside."""
    other = (1 - before) / before
    return 1 / (1 + other * math.exp(-epsilon))


def detection(epsilon: float, delta: float, alarm: float) -> float:
    """The highest rate of right alarms at this rate of false ones."""
    steep = factor(epsilon) * alarm + delta
    flat = 1 - math.exp(-epsilon) * (1 - delta - alarm)
    return min(1.0, steep, flat)


def largest_auc(epsilon: float, delta: float) -> float:
    """The area under `detection`, which no attack's ROC curve rises above: three straight pieces."""
    knee = (1 - delta) / (1 + factor(epsilon))
    height = detection(epsilon, delta, knee)
    return knee * (delta + height) / 2 + (1 - delta - knee) * (height + 1) / 2 + delta


def of_group(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """What a person with so many units is promised; delta 1 promises nothing."""
    if epsilon == 0:
        return 0.0, min(1.0, size * delta)
    log_sum = (size - 1) * epsilon + math.log1p(-math.exp(-size * epsilon)) - math.log1p(-math.exp(-epsilon))
    return size * epsilon, math.exp(min(0.0, math.log(delta) + log_sum))


def largest_group(epsilon: float, delta: float) -> int:
    """The most units of one person of which anything is promised."""
    size = 1
    while size < 10_000 and of_group(epsilon, delta, size + 1)[1] < 1:
        size += 1
    return size
