"""What travels between coordinator and sites; parcels.py makes bytes of it.

A turn is an identity: a re-run keeps its turn and raises `attempt`. `counted` is the last (turn, attempt) in
which *this site's* reply entered the state, so a site knows which of its pending memories to keep.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from pipeline.core.errors import BadStrategy
from pipeline.protocol.tasks import Job, Result, Split, Work

SiteId = str
Identity = tuple[int, int]  # (turn, attempt)
Memory = Mapping[str, Tensor]  # a site's own state; never leaves it
Vectors = Mapping[str, Tensor]
Sees = Literal["totals", "groups", "each"]  # what of the sites' answers somebody must look at


Weighting = Literal["examples", "equal", "inverse"]
BUDGET = "privacy budget"  # how a site's excuse begins when it has nothing left to spend


def weigh(rule: Weighting, work: Work | None) -> float:
    """`inverse`: sites with few examples count more, so that a small hospital is heard."""
    n = float(work.examples) if work is not None else 1.0
    return {"examples": n, "equal": 1.0, "inverse": 1.0 / max(n, 1.0)}[rule]


@dataclass(frozen=True)
class Packed:
    """A vector of n numbers as a codec sends it."""

    n: int
    parts: Vectors


@dataclass(frozen=True)
class Message:
    task: str
    turn: int
    vectors: Vectors
    attempt: int = 0
    counted: Identity | None = None
    deadline: float | None = None
    partial: bool = True  # whether work cut short by the deadline is welcome
    splits: tuple[Split, ...] = ()  # what `judge` looks at


@dataclass(frozen=True)
class Update:
    """`mean` entries are averaged by the study's weighting rule, `sum` entries added.

    `group`: whose mean this belongs to, where an algorithm keeps several models and the site chooses.
    """

    mean: Vectors = field(default_factory=dict)
    sum: Vectors = field(default_factory=dict)
    work: Work | None = None
    group: int = 0


@dataclass(frozen=True)
class Reply:
    site: SiteId
    task: str
    turn: int
    attempt: int
    update: Update
    weight: float


@dataclass(frozen=True)
class Excuse:
    """A site that sits this turn out says why."""

    site: SiteId
    task: str
    turn: int
    reason: str


@dataclass(frozen=True)
class Wait:
    deadline: float | None = None
    quorum: int = 1
    partial: Literal["drop", "keep"] = "keep"
    late: Literal["drop", "keep"] = "drop"


Flow = Generator[Job, Result, tuple[Update, Memory]]


class Total:
    """Sums over replies, in the order of arrival; an engine that must repeat itself bit for bit yields in site order."""

    def __init__(self) -> None:
        self.works: dict[SiteId, Work] = {}
        self.sites: list[SiteId] = []
        self.count = 0
        self._weight = 0.0
        self._means: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, reply: Reply) -> None:
        update = reply.update
        self.count += 1
        self.sites.append(reply.site)
        self._weight += reply.weight
        for key, value in update.mean.items():
            _accumulate(self._means, key, value, reply.weight)
        for key, value in update.sum.items():
            _accumulate(self._sums, key, value, 1.0)
        if update.work is not None:
            self.works[reply.site] = update.work

    @classmethod
    def of(cls, replies: Iterable[Reply], means: Vectors | None = None) -> Total:
        """Of these replies; `means` where a rule other than the weighted mean made them."""
        total = cls()
        for reply in replies:
            total.add(reply if means is None else replace(reply, update=replace(reply.update, mean={})))
        if means is not None:
            total._means, total._weight = dict(means), 1.0
        return total

    @classmethod
    def summed(cls, means: Vectors, weight: float, sums: Vectors, sites: Iterable[SiteId]) -> Total:
        """Where only the sums are known: `means` of the weighted vectors, `weight` of the weights. No site's work is."""
        total = cls()
        total._means, total._weight, total._sums = dict(means), weight, dict(sums)
        total.sites = list(sites)
        total.count = len(total.sites)
        return total

    @property
    def sums(self) -> Vectors:
        """All that was added up as sums."""
        return self._sums

    @property
    def weighted(self) -> Vectors:
        """All that is averaged, before it is divided by the sum of the weights."""
        return self._means

    def mean(self, key: str) -> Tensor:
        return _get(self._means, key, "mean") / self._weight

    def sum(self, key: str) -> Tensor:
        return _get(self._sums, key, "sum")


def _get(have: Mapping[str, Tensor], key: str, kind: str) -> Tensor:
    if key not in have:
        raise BadStrategy(f"no site sent {key!r} as a {kind}; its Update holds {sorted(have)}")
    return have[key]


def _accumulate(into: dict[str, Tensor], key: str, value: Tensor, weight: float) -> None:
    if key in into:
        into[key].add_(value, alpha=weight) if value.is_floating_point() else into[key].add_(value)
    else:
        into[key] = value * weight if value.is_floating_point() else value.clone()
