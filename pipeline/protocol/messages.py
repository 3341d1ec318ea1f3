"""What travels between coordinator and sites; parcels.py makes bytes of it.

A turn is an identity: a re-run keeps its turn and raises `attempt`. `counted` is the last (turn, attempt) in
which *this site's* reply entered the state, so a site knows which of its pending memories to keep.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from pipeline.core.errors import StrategyContractError
from pipeline.core.parameters import NamedTensors
from pipeline.protocol.tasks import JobResult, LocalJob, LocalWork, Split

SiteId = str
RoundAttempt = tuple[int, int]  # (turn, attempt)
ClientState = Mapping[str, Tensor]  # a site's own state; never leaves it
Visibility = Literal["totals", "groups", "each"]  # what of the sites' answers somebody must look at


Weighting = Literal["examples", "equal", "inverse"]
BUDGET_DECLINE_PREFIX = "privacy budget"  # how a site's excuse begins when it has nothing left to spend


def client_weight(rule: Weighting, work: LocalWork | None) -> float:
    """`inverse`: sites with few examples count more, so that a small hospital is heard."""
    n = float(work.num_examples) if work is not None else 1.0
    return {"examples": n, "equal": 1.0, "inverse": 1.0 / max(n, 1.0)}[rule]


@dataclass(frozen=True)
class Message:
    task: str
    round: int
    vectors: NamedTensors
    attempt: int = 0
    last_accepted: RoundAttempt | None = None
    deadline: float | None = None
    accept_partial: bool = True  # whether work cut short by the deadline is welcome
    splits: tuple[Split, ...] = ()  # what `judge` looks at


@dataclass(frozen=True)
class ClientUpdate:
    """`mean` entries are averaged by the study's weighting rule, `sum` entries added.

    `group`: whose mean this belongs to, where an algorithm keeps several models and the site chooses.
    """

    averaged: NamedTensors = field(default_factory=dict)
    summed: NamedTensors = field(default_factory=dict)
    work: LocalWork | None = None
    cluster: int = 0


@dataclass(frozen=True)
class Reply:
    site: SiteId
    task: str
    round: int
    attempt: int
    update: ClientUpdate
    weight: float


@dataclass(frozen=True)
class Declined:
    """A site that sits this turn out says why."""

    site: SiteId
    task: str
    round: int
    reason: str


@dataclass(frozen=True)
class RoundPolicy:
    deadline: float | None = None
    quorum: int = 1
    partial_updates: Literal["drop", "keep"] = "keep"
    late_updates: Literal["drop", "keep"] = "drop"


ClientTask = Generator[LocalJob, JobResult, tuple[ClientUpdate, ClientState]]


class Aggregate:
    """Sums over replies, in the order of arrival; an engine that must repeat itself bit for bit yields in site order."""

    def __init__(self) -> None:
        self.work_by_client: dict[SiteId, LocalWork] = {}
        self.clients: list[SiteId] = []
        self.num_replies = 0
        self._weight_sum = 0.0
        self._weighted_sums: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, reply: Reply) -> None:
        update = reply.update
        self.num_replies += 1
        self.clients.append(reply.site)
        self._weight_sum += reply.weight
        for key, value in update.averaged.items():
            _accumulate(self._weighted_sums, key, value, reply.weight)
        for key, value in update.summed.items():
            _accumulate(self._sums, key, value, 1.0)
        if update.work is not None:
            self.work_by_client[reply.site] = update.work

    @classmethod
    def from_replies(cls, replies: Iterable[Reply], means: NamedTensors | None = None) -> Aggregate:
        """Of these replies; `means` where a rule other than the weighted mean made them."""
        aggregate = cls()
        for reply in replies:
            aggregate.add(reply if means is None else replace(reply, update=replace(reply.update, averaged={})))
        if means is not None:
            aggregate._weighted_sums, aggregate._weight_sum = dict(means), 1.0
        return aggregate

    @classmethod
    def from_sums(cls, means: NamedTensors, weight: float, sums: NamedTensors, clients: Iterable[SiteId]) -> Aggregate:
        """Where only the sums are known: `means` of the weighted vectors, `weight` of the weights. No site's work is."""
        aggregate = cls()
        aggregate._weighted_sums, aggregate._weight_sum, aggregate._sums = dict(means), weight, dict(sums)
        aggregate.clients = list(clients)
        aggregate.num_replies = len(aggregate.clients)
        return aggregate

    @property
    def all_sums(self) -> NamedTensors:
        """All that was added up as sums."""
        return self._sums

    @property
    def weighted_sums(self) -> NamedTensors:
        """All that is averaged, before it is divided by the sum of the weights."""
        return self._weighted_sums

    def mean(self, key: str) -> Tensor:
        return _require_vector(self._weighted_sums, key, "mean") / self._weight_sum

    def sum(self, key: str) -> Tensor:
        return _require_vector(self._sums, key, "sum")


def _require_vector(vectors: Mapping[str, Tensor], key: str, kind: str) -> Tensor:
    if key not in vectors:
        raise StrategyContractError(f"no site sent {key!r} as a {kind}; its Update holds {sorted(vectors)}")
    return vectors[key]


def _accumulate(accumulator: dict[str, Tensor], key: str, value: Tensor, weight: float) -> None:
    if key in accumulator:
        accumulator[key].add_(value, alpha=weight) if value.is_floating_point() else accumulator[key].add_(value)
    else:
        accumulator[key] = value * weight if value.is_floating_point() else value.clone()
