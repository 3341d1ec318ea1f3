"""Messages, replies and their aggregate; serialization.py turns them into bytes.

(round, attempt) identifies a request: a repeated round keeps its number and raises `attempt`. `last_accepted` is the
last (round, attempt) whose reply from *this* client entered the state; the client commits its pending state by it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch import Tensor

from pipeline.core.errors import StrategyContractError
from pipeline.core.parameters import NamedTensors
from pipeline.protocol.tasks import JobResult, LocalJob, LocalWork, Split

SiteId = str
RoundAttempt = tuple[int, int]  # (round, attempt)
ClientState = Mapping[str, Tensor]  # a client's own state; it never leaves the site
Visibility = Literal["totals", "groups", "each"]  # what the coordinator must see: the sum, sums by cluster, each reply
Weighting = Literal["examples", "equal", "inverse"]

DeclineKind = Literal[
    "busy",  # still works on an earlier round
    "late",  # cannot finish by the deadline
    "privacy_budget",  # the site's privacy budget does not allow the round
    "no_receipt",  # the charge to the ledger has no valid receipt
    "not_permitted",  # the site's policy or approval forbids the task
    "secure_aggregation",  # cannot take part in secure aggregation
    "not_sent",  # trained, but the update cannot be encoded or masked
    "too_large",  # the reply exceeds the size limit
    "failed",  # an error at the site
    "other",  # a kind that this version does not know
]
DECLINE_KINDS: frozenset[str] = frozenset(get_args(DeclineKind))
ADVERTISE_TASK, SHARE_TASK, UNMASK_TASK = "advertise", "share", "unmask"  # of secure aggregation, around the training
SECURE_AGGREGATION_TASKS = frozenset({ADVERTISE_TASK, SHARE_TASK, UNMASK_TASK})
FailureKind = Literal[DeclineKind, "quarantined", "no_reply"]


def client_weight(rule: Weighting, work: LocalWork | None) -> float:
    """`inverse`: sites with few examples count more."""
    n = float(work.num_examples) if work is not None else 1.0
    return {"examples": n, "equal": 1.0, "inverse": 1.0 / max(n, 1.0)}[rule]


@dataclass(frozen=True)
class Message:
    """A request to one client: a task, the round, and the strategy's payload."""

    task: str
    round: int
    vectors: NamedTensors
    attempt: int = 0
    last_accepted: RoundAttempt | None = None
    deadline: float | None = None  # seconds that the client may work
    accept_partial: bool = True  # whether the coordinator accepts work that the deadline cut short
    splits: tuple[Split, ...] = ()  # the splits to evaluate on


@dataclass(frozen=True)
class ClientUpdate:
    """`averaged` vectors (float32) enter a weighted mean by the study's weighting, `summed` vectors a sum. Their keys and
    shapes are the same at all clients.

    `cluster`: index of the model that the client chose, in an algorithm that keeps several.
    """

    averaged: NamedTensors = field(default_factory=dict)
    summed: NamedTensors = field(default_factory=dict)
    work: LocalWork | None = None
    cluster: int = 0


@dataclass(frozen=True)
class Reply:
    """A client's update, and what identifies the request that it replies to."""

    site: SiteId
    task: str
    round: int
    attempt: int
    update: ClientUpdate
    weight: float  # in means, by the study's weighting


@dataclass(frozen=True)
class Declined:
    """A client's reply that it does not take part in a round, and why.

    Logic depends on `kind` only; `text` is for human readers.
    """

    site: SiteId
    task: str
    round: int
    kind: DeclineKind
    text: str


@dataclass(frozen=True)
class ClientFailure:
    """Why a client's reply did not enter the aggregate."""

    kind: FailureKind
    text: str


@dataclass(frozen=True)
class RoundPolicy:
    """How long a round waits, and which updates count."""

    deadline: float | None = None  # seconds
    quorum: int = 1  # replies without which the round is void
    partial_updates: Literal["drop", "keep"] = "keep"  # of work that the deadline cut short
    late_updates: Literal["drop", "keep"] = "drop"  # that arrive in a later round

    @property
    def accepts_partial(self) -> bool:
        return self.partial_updates == "keep"

    @property
    def waits_for_all(self) -> bool:
        """Whether clients finish their work after the deadline, because a late update counts and a partial one does not."""
        return self.late_updates == "keep" and not self.accepts_partial

    def accepts_work(self, work: LocalWork | None) -> bool:
        return work is None or not work.is_partial or self.accepts_partial


# a client's half of an algorithm: yields local jobs, receives their results, returns the update and the next client state
ClientTask = Generator[LocalJob, JobResult, tuple[ClientUpdate, ClientState]]


class Aggregate:
    """Sums and means over replies, added in the order of arrival. For reproducible sums the engine yields replies in site order.

    clients: the sites that replied; num_replies: the number of replies, late ones of earlier rounds included; work_by_client: their work, unless it is hidden by secure
    aggregation.
    """

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
        """`means`: what a rule other than the weighted mean made of the `averaged` vectors."""
        aggregate = cls()
        for reply in replies:
            aggregate.add(reply if means is None else replace(reply, update=replace(reply.update, averaged={})))
        if means is not None:
            aggregate._weighted_sums, aggregate._weight_sum = dict(means), 1.0
        return aggregate

    @classmethod
    def from_sums(cls, means: NamedTensors, weight: float, sums: NamedTensors, clients: Iterable[SiteId]) -> Aggregate:
        """From sums alone: `means` of the weighted vectors, `weight` of the weights. `work_by_client` stays empty."""
        aggregate = cls()
        aggregate._weighted_sums, aggregate._weight_sum, aggregate._sums = dict(means), weight, dict(sums)
        aggregate.clients = list(clients)
        aggregate.num_replies = len(aggregate.clients)
        return aggregate

    @property
    def all_sums(self) -> NamedTensors:
        """The sums of the `summed` vectors."""
        return self._sums

    @property
    def weighted_sums(self) -> NamedTensors:
        """The weighted sums of the `averaged` vectors, not yet divided by the sum of the weights."""
        return self._weighted_sums

    def mean(self, key: str) -> Tensor:
        """The mean of the clients' `ClientUpdate.averaged[key]`, by the study's weighting and aggregation rule."""
        return _require_vector(self._weighted_sums, key, "averaged") / self._weight_sum

    def sum(self, key: str) -> Tensor:
        """The sum of the clients' `ClientUpdate.summed[key]`."""
        return _require_vector(self._sums, key, "summed")


def _require_vector(vectors: Mapping[str, Tensor], key: str, kind: str) -> Tensor:
    if key not in vectors:
        raise StrategyContractError(f"no client sent {key!r} to be {kind}; its ClientUpdate holds {sorted(vectors)}")
    return vectors[key]


def _accumulate(accumulator: dict[str, Tensor], key: str, value: Tensor, weight: float) -> None:
    if key in accumulator:
        accumulator[key].add_(value, alpha=weight) if value.is_floating_point() else accumulator[key].add_(value)
    else:
        accumulator[key] = value * weight if value.is_floating_point() else value.clone()
