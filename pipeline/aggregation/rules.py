"""How the answers of a round become one: the weighted mean, or a rule that a few bad sites cannot bend.

A rule applies wherever a strategy asks for a total. All but `mean` look at single answers, so they do not go with
secure sums. Whatever the rule, an update far longer than the round's usual one is quarantined first.
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

MIN_UPDATES_FOR_OUTLIERS = 3  # answers of which a median says anything


class AggregationRule(Component):
    paper: ClassVar[str] = ""
    visibility: ClassVar[Visibility] = "each"
    is_streamable: ClassVar[bool] = False  # answers can be added one by one
    outlier_factor: float | None = Field(100.0, gt=1)  # times the median length of the round's updates

    @property
    def min_clients(self) -> int:
        """Answers that it needs."""
        return 1

    @abstractmethod
    def aggregate(self, replies: Sequence[Reply]) -> Aggregate: ...

    def finalize_sum(self, aggregate: Aggregate) -> Aggregate:
        """Of a sum of which nobody knows the parts."""
        return aggregate

    def outlier_clients(self, norms: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, str]:
        """site -> why its update is not to be believed; of each answer's `lengths`."""
        if self.outlier_factor is None or len(norms) < MIN_UPDATES_FOR_OUTLIERS:
            return {}
        outliers: dict[str, str] = {}
        for vector_name in norms[0][1]:
            median_norm = float(
                torch.tensor([client_norms[vector_name] for _, client_norms in norms], dtype=torch.float64).median()
            )
            outliers |= {
                site: f"quarantined: its {vector_name} is {client_norms[vector_name] / median_norm:.3g} times as long as the median one; look at "
                "the site's data, or raise aggregation.outlier_factor"
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
    """Of every coordinate; sites count alike. Bears less than half of the sites being bad."""

    paper: ClassVar[str] = "Yin et al. 2018, arXiv 1803.01498"
    name: Literal["median"] = "median"

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        low, high = (len(replies) - 1) // 2, len(replies) // 2
        return _aggregate_coordinatewise(replies, lambda stacked: stacked.sort(0).values[[low, high]].mean(0))


class TrimmedMean(AggregationRule):
    """Of every coordinate, after leaving out the `share` largest and smallest values; sites count alike."""

    paper: ClassVar[str] = "Yin et al. 2018, arXiv 1803.01498"
    name: Literal["trimmed_mean"] = "trimmed_mean"
    trim_fraction: float = Field(0.1, ge=0, lt=0.5)

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        num_trimmed = int(self.trim_fraction * len(replies) + 1e-9)
        return _aggregate_coordinatewise(
            replies, lambda stacked: stacked.sort(0).values[num_trimmed : len(replies) - num_trimmed].mean(0)
        )


class Krum(AggregationRule):
    """The one update whose nearest others are nearest."""

    paper: ClassVar[str] = "Blanchard et al. 2017, arXiv 1703.02757"
    name: Literal["krum"] = "krum"
    num_byzantine: NonNegativeInt = 1  # sites that may be bad

    @property
    def min_clients(self) -> int:
        return 2 * self.num_byzantine + 3

    def aggregate(self, replies: Sequence[Reply]) -> Aggregate:
        return _average_selected(replies, _rank_by_krum_score(replies, self.num_byzantine)[:1])


class MultiKrum(AggregationRule):
    """The mean of the `best` updates by Krum's score; all but `bad` of them if not given."""

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
    """The weighted mean of updates cut to a length: `bound`, or the round's median length if not given."""

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
    """Of what enters the state: the update, BatchNorm's statistics, and sums of vectors."""
    vectors = {"update": _flatten_update(reply)} | {k: v for k, v in reply.update.summed.items() if v.dim()}
    if "stats" in reply.update.averaged:
        vectors["stats"] = reply.update.averaged["stats"]
    floats = {name: v if v.is_floating_point() else v.double() for name, v in vectors.items()}
    return {name: float(torch.linalg.vector_norm(v, dtype=torch.float64)) for name, v in floats.items()}


def _flatten_update(reply: Reply) -> Tensor:
    """(P,) all that the site wants averaged; neither statistics nor single numbers are a direction."""
    parts = [v.float() for k, v in reply.update.averaged.items() if _is_update_vector(k, v)]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)


def _is_update_vector(key: str, value: Tensor) -> bool:
    return key != "stats" and value.dim() == 1


def clip_update(reply: Reply, max_norm: float) -> Reply:
    """With an update no longer than that."""
    return _scale_update(reply, min(1.0, max_norm / max(float(_flatten_update(reply).norm()), 1e-30)))


def _scale_update(reply: Reply, factor: float) -> Reply:
    if factor == 1.0:
        return reply
    means = {k: v * factor if _is_update_vector(k, v) else v for k, v in reply.update.averaged.items()}
    return replace(reply, update=replace(reply.update, averaged=means))


def _aggregate_coordinatewise(replies: Sequence[Reply], reduce_stacked: Callable[[Tensor], Tensor]) -> Aggregate:
    """`rule`: (S, ...) -> (...)."""
    keys = replies[0].update.averaged if replies else {}
    return Aggregate.from_replies(
        replies, {key: reduce_stacked(torch.stack([r.update.averaged[key] for r in replies])) for key in keys}
    )


def _average_selected(replies: Sequence[Reply], selected: Sequence[int]) -> Aggregate:
    """Means of the chosen alone, each counting once; sums, which only report, of all."""
    keys = replies[0].update.averaged if replies else {}
    means = {key: torch.stack([replies[i].update.averaged[key] for i in sorted(selected)]).mean(0) for key in keys}
    return Aggregate.from_replies(replies, means)


def _rank_by_krum_score(replies: Sequence[Reply], num_byzantine: int) -> list[int]:
    """Places in the order of Krum's score: the sum of squared distances to the n - bad - 2 nearest others."""
    n = len(replies)
    if n < 2 * num_byzantine + 3:
        raise QuorumNotReachedError(
            f"Krum with aggregation.num_byzantine = {num_byzantine} needs {2 * num_byzantine + 3} answers, {n} came"
        )
    updates = torch.stack([_flatten_update(reply) for reply in replies]).double()
    nearest_distances = (
        torch.cdist(updates, updates).square().sort(1).values[:, 1 : n - num_byzantine - 1]
    )  # (n, n - bad - 2), without itself
    return [int(i) for i in nearest_distances.sum(1).argsort(stable=True)]
