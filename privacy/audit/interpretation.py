"""Interpretation of (epsilon, delta): bounds of posterior belief, attack rates and AUC, and group privacy.

For data sets D and D' that differ by one unit, Pr[M(D) in S] <= e^epsilon Pr[M(D') in S] + delta for every set S of
outcomes. A test that distinguishes D from D' with a given false positive rate therefore has a bounded true positive rate
(Kairouz et al. 2015, arXiv 1311.0776). A group of k units has (k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1)).
"""

from __future__ import annotations

import math


def odds_ratio(epsilon: float) -> float:
    """The largest factor by which the odds of any statement about a unit can change."""
    return math.exp(epsilon) if epsilon < 700 else math.inf


def posterior_bound(prior: float, epsilon: float) -> float:
    """The largest posterior belief for this prior belief, if delta is 0."""
    prior_odds_against = (1 - prior) / prior
    return 1 / (1 + prior_odds_against * math.exp(-epsilon))


def tpr_bound(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """The largest true positive rate at this false positive rate."""
    steep_bound = odds_ratio(epsilon) * false_positive_rate + delta
    flat_bound = 1 - math.exp(-epsilon) * (1 - delta - false_positive_rate)
    return min(1.0, steep_bound, flat_bound)


def auc_bound(epsilon: float, delta: float) -> float:
    """The area under `tpr_bound`, the piecewise linear upper bound of every attack's ROC curve."""
    knee = (1 - delta) / (1 + odds_ratio(epsilon))
    height = tpr_bound(epsilon, delta, knee)
    return knee * (delta + height) / 2 + (1 - delta - knee) * (height + 1) / 2 + delta


def group_privacy(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """(epsilon, delta) of a person with `size` units; delta 1 promises nothing."""
    if epsilon == 0:
        return 0.0, min(1.0, size * delta)
    log_sum = (size - 1) * epsilon + math.log1p(-math.exp(-size * epsilon)) - math.log1p(-math.exp(-epsilon))
    return size * epsilon, math.exp(min(0.0, math.log(delta) + log_sum))


def max_group_size(epsilon: float, delta: float) -> int:
    """The largest number of units per person with delta below 1."""
    size = 1
    while size < 10_000 and group_privacy(epsilon, delta, size + 1)[1] < 1:
        size += 1
    return size
