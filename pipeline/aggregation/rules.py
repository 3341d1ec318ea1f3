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

from pipeline.core.errors import TooFew
from pipeline.core.registry import Component
from pipeline.protocol.messages import Reply, Sees, Total

FEWEST = 3  # answers of which a median says anything


class Combine(Component):
    paper: ClassVar[str] = ""
    sees: ClassVar[Sees] = "each"
    adds: ClassVar[bool] = False  # answers can be added one by one
    absurd: float | None = Field(100.0, gt=1)  # times the median length of the round's updates

    @property
    def fewest(self) -> int:
        """Answers that it needs."""
        return 1

    @abstractmethod
    def total(self, replies: Sequence[Reply]) -> Total: ...

    def summed(self, total: Total) -> Total:
        """Of a sum of which nobody knows the parts."""
        return total

    def outcasts(self, lengths: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, str]:
        """site -> why its update is not to be believed; of each answer's `lengths`."""
        if self.absurd is None or len(lengths) < FEWEST:
            return {}
        found: dict[str, str] = {}
        for part in lengths[0][1]:
            usual = float(torch.tensor([each[part] for _, each in lengths], dtype=torch.float64).median())
            found |= {
                site: f"quarantined: its {part} is {each[part] / usual:.3g} times as long as the median one; look at "
                "the site's data, or raise combine.absurd"
                for site, each in lengths
                if usual > 0 and each[part] > self.absurd * usual
            }
        return found


class Mean(Combine):
    """Weighted by the study's `weighting`."""

    sees: ClassVar[Sees] = "totals"
    adds: ClassVar[bool] = True
    name: Literal["mean"] = "mean"

    def total(self, replies: Sequence[Reply]) -> Total:
        return Total.of(replies)


MEAN = Mean()


class Median(Combine):
    """Of every coordinate; sites count alike. Bears less than half of the sites being bad."""

    paper: ClassVar[str] = "Yin et al. 2018, arXiv 1803.01498"
    name: Literal["median"] = "median"

    def total(self, replies: Sequence[Reply]) -> Total:
        low, high = (len(replies) - 1) // 2, len(replies) // 2
        return _by_coordinate(replies, lambda stacked: stacked.sort(0).values[[low, high]].mean(0))


class TrimmedMean(Combine):
    """Of every coordinate, after leaving out the `share` largest and smallest values; sites count alike."""

    paper: ClassVar[str] = "Yin et al. 2018, arXiv 1803.01498"
    name: Literal["trimmed_mean"] = "trimmed_mean"
    share: float = Field(0.1, ge=0, lt=0.5)

    def total(self, replies: Sequence[Reply]) -> Total:
        cut = int(self.share * len(replies) + 1e-9)
        return _by_coordinate(replies, lambda stacked: stacked.sort(0).values[cut : len(replies) - cut].mean(0))


class Krum(Combine):
    """The one update whose nearest others are nearest."""

    paper: ClassVar[str] = "Blanchard et al. 2017, arXiv 1703.02757"
    name: Literal["krum"] = "krum"
    bad: NonNegativeInt = 1  # sites that may be bad

    @property
    def fewest(self) -> int:
        return 2 * self.bad + 3

    def total(self, replies: Sequence[Reply]) -> Total:
        return _of_chosen(replies, _trusted(replies, self.bad)[:1])


class MultiKrum(Combine):
    """The mean of the `best` updates by Krum's score; all but `bad` of them if not given."""

    paper: ClassVar[str] = "Blanchard et al. 2017, arXiv 1703.02757"
    name: Literal["multi_krum"] = "multi_krum"
    bad: NonNegativeInt = 1
    best: PositiveInt | None = None

    @property
    def fewest(self) -> int:
        return 2 * self.bad + 3

    def total(self, replies: Sequence[Reply]) -> Total:
        return _of_chosen(replies, _trusted(replies, self.bad)[: self.best or len(replies) - self.bad])


class NormBound(Combine):
    """The weighted mean of updates cut to a length: `bound`, or the round's median length if not given."""

    paper: ClassVar[str] = "Sun et al. 2019, arXiv 1911.07963"
    name: Literal["norm_bound"] = "norm_bound"
    bound: PositiveFloat | None = None

    def total(self, replies: Sequence[Reply]) -> Total:
        lengths = torch.stack([_direction(reply).norm() for reply in replies])
        bound = torch.tensor(self.bound) if self.bound is not None else lengths.median()
        shrink = (bound / lengths.clamp(min=1e-30)).clamp(max=1.0)
        return Total.of(_scaled(reply, float(by)) for reply, by in zip(replies, shrink, strict=True))


def lengths(reply: Reply) -> dict[str, float]:
    """Of what enters the state: the update, BatchNorm's statistics, and sums of vectors."""
    found = {"update": _direction(reply)} | {k: v for k, v in reply.update.sum.items() if v.dim()}
    if "stats" in reply.update.mean:
        found["stats"] = reply.update.mean["stats"]
    floats = {part: v if v.is_floating_point() else v.double() for part, v in found.items()}
    return {part: float(torch.linalg.vector_norm(v, dtype=torch.float64)) for part, v in floats.items()}


def _direction(reply: Reply) -> Tensor:
    """(P,) all that the site wants averaged; neither statistics nor single numbers are a direction."""
    parts = [v.float() for k, v in reply.update.mean.items() if _directed(k, v)]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0)


def _directed(key: str, value: Tensor) -> bool:
    return key != "stats" and value.dim() == 1


def cut_to(reply: Reply, length: float) -> Reply:
    """With an update no longer than that."""
    return _scaled(reply, min(1.0, length / max(float(_direction(reply).norm()), 1e-30)))


def _scaled(reply: Reply, by: float) -> Reply:
    if by == 1.0:
        return reply
    means = {k: v * by if _directed(k, v) else v for k, v in reply.update.mean.items()}
    return replace(reply, update=replace(reply.update, mean=means))


def _by_coordinate(replies: Sequence[Reply], rule: Callable[[Tensor], Tensor]) -> Total:
    """`rule`: (S, ...) -> (...)."""
    keys = replies[0].update.mean if replies else {}
    return Total.of(replies, {key: rule(torch.stack([r.update.mean[key] for r in replies])) for key in keys})


def _of_chosen(replies: Sequence[Reply], chosen: Sequence[int]) -> Total:
    """Means of the chosen alone, each counting once; sums, which only report, of all."""
    keys = replies[0].update.mean if replies else {}
    means = {key: torch.stack([replies[i].update.mean[key] for i in sorted(chosen)]).mean(0) for key in keys}
    return Total.of(replies, means)


def _trusted(replies: Sequence[Reply], bad: int) -> list[int]:
    """Places in the order of Krum's score: the sum of squared distances to the n - bad - 2 nearest others."""
    n = len(replies)
    if n < 2 * bad + 3:
        raise TooFew(f"Krum with combine.bad = {bad} needs {2 * bad + 3} answers, {n} came")
    flat = torch.stack([_direction(reply) for reply in replies]).double()
    apart = torch.cdist(flat, flat).square().sort(1).values[:, 1 : n - bad - 1]  # (n, n - bad - 2), without itself
    return [int(i) for i in apart.sum(1).argsort(stable=True)]
