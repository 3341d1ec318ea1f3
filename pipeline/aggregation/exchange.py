"""One request to the clients over an engine: messages out, validated replies back, and the log of what happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pipeline.core.errors import MessageError, QuorumNotReachedError, ReplyError, StrategyContractError
from pipeline.core.parameters import NamedTensors
from pipeline.protocol.compression import NO_COMPRESSION, UpdateCompression
from pipeline.protocol.messages import (
    ClientFailure,
    Declined,
    Message,
    Reply,
    RoundAttempt,
    RoundPolicy,
    SiteId,
    Weighting,
    client_weight,
)
from pipeline.protocol.serialization import deserialize_reply
from pipeline.protocol.tasks import Split


class Engine(Protocol):
    """Delivers messages to sites and yields their replies."""

    def exchange(
        self, message_bytes: Mapping[SiteId, bytes], round_policy: RoundPolicy
    ) -> Iterator[tuple[SiteId, bytes]]: ...


@dataclass
class RequestLog:
    """What happened in one request, for the record of the round."""

    requested: list[SiteId] = field(default_factory=list)
    accepted: list[Reply] = field(default_factory=list)  # without their vectors
    failures: dict[SiteId, ClientFailure] = field(default_factory=dict)
    vector_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the accepted vectors; equal for all
    bytes_up: int = 0
    bytes_down: int = 0

    def quarantine(self, site: SiteId, reason: object) -> None:
        self.failures[site] = ClientFailure("quarantined", str(reason).removeprefix(f"{site}: "))

    def clear_failures(self, sites: Sequence[SiteId]) -> None:
        for site in sites:
            self.failures.pop(site, None)

    def discard_accepted(self) -> None:
        """The round is void: no reply enters the state."""
        self.accepted.clear()


@dataclass(frozen=True)
class RoundExchange:
    """The exchanges of one attempt of a round. A request is one exchange, or four with secure aggregation."""

    engine: Engine
    task: str
    round: int
    attempt: int
    round_policy: RoundPolicy
    last_accepted: Mapping[SiteId, RoundAttempt]
    splits: tuple[Split, ...] = ()
    compression: UpdateCompression = NO_COMPRESSION
    weighting: Weighting | None = None  # the rule that a client's weight must follow; None: any weight
    log: RequestLog = field(default_factory=RequestLog)

    def record_requested(self, payloads: Mapping[SiteId, NamedTensors]) -> None:
        if self.log.requested:
            raise StrategyContractError(
                "a round makes one request: clients commit their state by round and attempt; call only one of "
                "aggregate, aggregate_by_cluster and collect"
            )
        self.log.requested.extend(payloads)

    def exchange(
        self, task: str, payloads: Mapping[SiteId, NamedTensors], num_clusters: int | None = None
    ) -> Iterator[tuple[Reply, bytes]]:
        """Yields the valid replies, and the bytes that they came in, as they arrive; `log` has the failures."""
        message_bytes = self.compression.serialize_messages(
            {site: self._build_message(task, site, vectors) for site, vectors in payloads.items()}
        )
        self.log.bytes_down += sum(map(len, message_bytes.values()))
        already_received: list[Reply] = []
        for site, reply_bytes in self.engine.exchange(message_bytes, self.round_policy):
            self.log.bytes_up += len(reply_bytes)
            try:
                reply = self._validate_reply(
                    task, site, deserialize_reply(site, reply_bytes, self.compression.decode_uplink), already_received
                )
                if reply is not None and num_clusters is not None and not 0 <= reply.update.cluster < num_clusters:
                    raise ReplyError(f"{site}: chose cluster {reply.update.cluster}, but there are {num_clusters}")
            except (ReplyError, MessageError) as error:
                self.log.quarantine(site, error)
                continue
            if reply is not None:
                already_received.append(strip_vectors(reply))
                yield reply, reply_bytes

    def record_accepted(self, replies: Sequence[Reply], payloads: Mapping[SiteId, NamedTensors]) -> None:
        """Records accepted and missing replies; raises QuorumNotReachedError, and accepts none, if there are too few."""
        replied = {reply.site for reply in replies}
        for site in payloads:
            if site not in replied:
                self.log.failures.setdefault(site, ClientFailure("no_reply", "no reply"))
        if len(replied) < self.round_policy.quorum:
            raise QuorumNotReachedError(
                f"{len(replied)} of {len(payloads)} sites replied, round.quorum is {self.round_policy.quorum}"
            )
        self.log.accepted.extend(map(strip_vectors, replies))

    def _build_message(self, task: str, site: SiteId, vectors: NamedTensors) -> Message:
        return Message(
            task=task,
            round=self.round,
            vectors=vectors,
            attempt=self.attempt,
            last_accepted=self.last_accepted.get(site),
            deadline=self.round_policy.deadline,
            accept_partial=self.round_policy.accepts_partial,
            splits=self.splits,
        )

    def _validate_reply(
        self, task: str, site: SiteId, reply: Reply | Declined, already_received: Sequence[Reply]
    ) -> Reply | None:
        if isinstance(reply, Declined):
            # the engine declines an oversized reply on the site's behalf
            kind = "quarantined" if reply.kind == "too_large" else reply.kind
            self.log.failures[site] = ClientFailure(kind, reply.text)
            return None
        is_late = reply.round < self.round and self.round_policy.late_updates == "keep"
        if reply.task != task or not (is_late or (reply.round, reply.attempt) == (self.round, self.attempt)):
            raise ReplyError(f"{site}: replied to round {reply.round} ({reply.task}) when asked for round {self.round}")
        if not is_late and site not in self.log.requested:
            raise ReplyError(f"{site}: replied without being asked")
        if any((r.site, r.round, r.attempt) == (site, reply.round, reply.attempt) for r in already_received):
            raise ReplyError(f"{site}: replied to round {reply.round} twice")
        work = reply.update.work
        if self.weighting is not None and reply.weight != client_weight(self.weighting, work):
            raise ReplyError(f"{site}: claims a weight of {reply.weight:g}, but weighting is {self.weighting!r}")
        if work is not None and not self.round_policy.accepts_work(work):
            self.log.failures[site] = ClientFailure("late", f"{work.steps_done} of {work.steps_requested} steps")
            return None
        return reply


def strip_vectors(reply: Reply) -> Reply:
    """The reply with its single numbers, without its vectors."""
    scalars = {key: value for key, value in reply.update.summed.items() if value.dim() == 0}
    return replace(reply, update=replace(reply.update, averaged={}, summed=scalars))
