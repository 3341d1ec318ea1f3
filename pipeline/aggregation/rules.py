"""Aggregation rules: the weighted mean, and robust rules that tolerate a few Byzantine clients.

A rule applies wherever a strategy requests an aggregate. All rules except `mean` need single replies, so they cannot be
combined with secure aggregation. Every rule first quarantines updates with an outlying norm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from pipeline.core.errors import QuorumNotReachedError
from pipeline.core.registry import Component
from pipeline.protocol.messages import Aggregate, Reply, Visibility

MIN_UPDATES_FOR_OUTLIERS = 3  # with fewer replies the median says nothing about outliers


class AggregationRule(Component):
    """How the replies of a round become one aggregate. Base class of all rules."""

    paper: ClassVar[str] = ""
    visibility: ClassVar[Visibility] = "each"
    is_streamable: ClassVar[bool] = False  # replies can be added one by one
    outlier_factor: float | None = Field(100.0, gt=1)  # outliers exceed this multiple of the round's median norm

    @property
    def min_clients(self) -> int:
        """The number of replies that the rule needs."""
        return 1

    @abstractmethod
    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        """The aggregate of these replies; they are without outliers and have the same keys and shapes."""

    def finalize_sum(self, aggregate: Aggregate) -> Aggregate:
        """The result for a secure aggregation, of which only the sum is known."""
        return aggregate

    def outlier_clients(self, norms: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, str]:
        """site -> why its update is an outlier; `norms` are those of `update_norms`."""
        if self.outlier_factor is None or len(norms) < MIN_UPDATES_FOR_OUTLIERS:
            return {}
        outliers: dict[str, str] = {}
        for vector_name in norms[0][1]:
            median_norm = float(
                torch.tensor([client_norms[vector_name] for _, client_norms in norms], dtype=torch.float64).median()
            )
            outliers |= {
                site: f"its {vector_name} is {client_norms[vector_name] / median_norm:.3g} times as long as the median one; "
                "check the site's data, or raise aggregation.outlier_factor"
                for site, client_norms in norms
                if median_norm > 0 and client_norms[vector_name] > self.outlier_factor * median_norm
            }
        return outliers


class WeightedMean(AggregationRule):
    """Weighted by the study's `weighting`."""

    visibility: ClassVar[Visibility] = "totals"
    is_streamable: ClassVar[bool] = True
    name: Literal["mean"] = "mean"

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        return Aggregate.from_replies(replies)


WEIGHTED_MEAN = WeightedMean()


class CoordinateMedian(AggregationRule):
    """The median of every coordinate, unweighted. Tolerates less than half Byzantine clients."""

    paper: ClassVar[str] = "Yin et al. 2018, arXiv 1803.01498"
    name: Literal["median"] = "median"

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        low, high = (len(replies) - 1) // 2, len(replies) // 2
        return _aggregate_coordinatewise(replies, lambda stacked: stacked.sort(0).values[[low, high]].mean(0))


class TrimmedMean(AggregationRule):
    """The unweighted mean of every coordinate without the `trim_fraction` largest and smallest values."""

    paper: ClassVar[str] = "Yin et al. 2018, arXiv 1803.01498"
    name: Literal["trimmed_mean"] = "trimmed_mean"
    trim_fraction: float = Field(0.1, ge=0, lt=0.5)

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        num_trimmed = int(self.trim_fraction * len(replies) + 1e-9)
        return _aggregate_coordinatewise(
            replies, lambda stacked: stacked.sort(0).values[num_trimmed : len(replies) - num_trimmed].mean(0)
        )


class Krum(AggregationRule):
    """The single update with the smallest sum of squared distances to its nearest neighbours."""

    paper: ClassVar[str] = "Blanchard et al. 2017, arXiv 1703.02757"
    name: Literal["krum"] = "krum"
    num_byzantine: NonNegativeInt = 1  # tolerated Byzantine clients

    @property
    def min_clients(self) -> int:
        return 2 * self.num_byzantine + 3

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        return _average_selected(replies, _rank_by_krum_score(replies, self.num_byzantine)[:1])


class MultiKrum(AggregationRule):
    """The mean of the `num_selected` best updates by Krum's score (default: all but `num_byzantine`)."""

    paper: ClassVar[str] = "Blanchard et al. 2017, arXiv 1703.02757"
    name: Literal["multi_krum"] = "multi_krum"
    num_byzantine: NonNegativeInt = 1
    num_selected: PositiveInt | None = None

    @property
    def min_clients(self) -> int:
        return 2 * self.num_byzantine + 3

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        return _average_selected(
            replies,
            _rank_by_krum_score(replies, self.num_byzantine)[: self.num_selected or len(replies) - self.num_byzantine],
        )


class NormBound(AggregationRule):
    """The weighted mean of updates clipped to `max_norm` (default: the round's median norm)."""

    paper: ClassVar[str] = "Sun et al. 2019, arXiv 1911.07963"
    name: Literal["norm_bound"] = "norm_bound"
    max_norm: PositiveFloat | None = None

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        norms = torch.stack([_flatten_update(reply).norm() for reply in replies])
        max_norm = torch.tensor(self.max_norm) if self.max_norm is not None else norms.median()
        factors = (max_norm / norms.clamp(min=1e-30)).clamp(max=1.0)
        return Aggregate.from_replies(
            _scale_update(reply, float(factor)) for reply, factor in zip(replies, factors, strict=True)
        )


def update_norms(reply: Reply) -> dict[str, float]:
    """Norms of everything that enters the state: the update, BatchNorm's statistics, and summed vectors."""
    vectors = {"update": _flatten_update(reply)} | {k: v for k, v in reply.update.summed.items() if v.dim()}
    if "stats" in reply.update.averaged:
        vectors["stats"] = reply.update.averaged["stats"]
    floats = {name: v if v.is_floating_point() else v.double() for name, v in vectors.items()}
    return {name: float(torch.linalg.vector_norm(v, dtype=torch.float64)) for name, v in floats.items()}


def _flatten_update(reply: Reply) -> Tensor:
    """(P,) all averaged vectors in one, without statistics and single numbers."""
    parts = [v.float() for k, v in reply.update.averaged.items() if _is_update_vector(k, v)]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)


def _is_update_vector(key: str, value: Tensor) -> bool:
    return key != "stats" and value.dim() == 1


def clip_update(reply: Reply, max_norm: float) -> Reply:
    """The reply with its update clipped to this norm."""
    return _scale_update(reply, min(1.0, max_norm / max(float(_flatten_update(reply).norm()), 1e-30)))


def _scale_update(reply: Reply, factor: float) -> Reply:
    if factor == 1.0:
        return reply
    means = {k: v * factor if _is_update_vector(k, v) else v for k, v in reply.update.averaged.items()}
    return replace(reply, update=replace(reply.update, averaged=means))


def _aggregate_coordinatewise(replies: Sequence[Reply], reduce_stacked: Callable[[Tensor], Tensor]) -> Aggregate:
    """reduce_stacked: (S, ...) -> (...)."""
    keys = replies[0].update.averaged if replies else {}
    return Aggregate.from_replies(
        replies, {key: reduce_stacked(torch.stack([r.update.averaged[key] for r in replies])) for key in keys}
    )


def _average_selected(replies: Sequence[Reply], selected: Sequence[int]) -> Aggregate:
    """Unweighted means of the selected replies; sums over all replies."""
    keys = replies[0].update.averaged if replies else {}
    means = {key: torch.stack([replies[i].update.averaged[key] for i in sorted(selected)]).mean(0) for key in keys}
    return Aggregate.from_replies(replies, means)


def _rank_by_krum_score(replies: Sequence[Reply], num_byzantine: int) -> list[int]:
    """Indices ordered by Krum's score: the sum of squared distances to the n - num_byzantine - 2 nearest neighbours."""
    n = len(replies)
    if n < 2 * num_byzantine + 3:
        raise QuorumNotReachedError(
            f"Krum with aggregation.num_byzantine = {num_byzantine} needs {2 * num_byzantine + 3} replies, {n} came"
        )
    updates = torch.stack([_flatten_update(reply) for reply in replies]).double()
    # (n, n - num_byzantine - 2), without the distance to itself
    nearest_distances = torch.cdist(updates, updates).square().sort(1).values[:, 1 : n - num_byzantine - 1]
    return [int(i) for i in nearest_distances.sum(1).argsort(stable=True)]
