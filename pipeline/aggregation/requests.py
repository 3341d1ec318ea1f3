"""Sends a strategy's payloads through an engine, validates the replies and aggregates them; the same for every engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import torch

from pipeline.aggregation.rules import WEIGHTED_MEAN, AggregationRule, update_norms
from pipeline.core.errors import MessageError, QuorumNotReachedError, ReplyError, StrategyContractError
from pipeline.core.parameters import NamedTensors
from pipeline.protocol.compression import NO_COMPRESSION, UpdateCompression
from pipeline.protocol.messages import (
    Aggregate,
    ClientFailure,
    Declined,
    Message,
    Reply,
    RoundAttempt,
    RoundPolicy,
    SiteId,
    Visibility,
    Weighting,
    client_weight,
)
from pipeline.protocol.serialization import deserialize_reply
from pipeline.protocol.tasks import JobResult, LocalJob, Split

if TYPE_CHECKING:
    from pipeline.aggregation.secure_aggregation import SecureAggregationSetup

# (mean or sum, key, shape, dtype) of every tensor in an update
UpdateSignature = tuple[tuple[str, str, tuple[int, ...], torch.dtype], ...]
MAX_BUFFERED_REPLY_BYTES = 256 << 20  # bytes of replies up to which streaming aggregation still buffers them all
VISIBILITY_ORDER: Sequence[Visibility] = ("totals", "groups", "each")


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


@dataclass(frozen=True)
class RoundRequest:
    """The `ClientRequests` of one attempt of a round, and what came of it in `log`."""

    engine: Engine
    run_jobs: Callable[[Sequence[LocalJob], int], list[JobResult]]
    task: str
    round: int
    attempt: int
    round_policy: RoundPolicy
    last_accepted: Mapping[SiteId, RoundAttempt]
    splits: tuple[Split, ...] = ()
    visibility: Visibility = "each"  # what the strategy declared
    compression: UpdateCompression = NO_COMPRESSION
    aggregation_rule: AggregationRule = WEIGHTED_MEAN
    weighting: Weighting | None = None  # the rule that a client's weight must follow; None: any weight
    secure_aggregation: SecureAggregationSetup | None = None  # None: the coordinator sees single replies
    stream_aggregation: bool = False  # spool replies to disk and add them one by one, to bound the memory
    log: RequestLog = field(default_factory=RequestLog)

    def aggregate(self, payloads: Mapping[SiteId, NamedTensors]) -> Aggregate:
        if self.secure_aggregation is not None:
            from pipeline.aggregation.secure_aggregation import run_secure_aggregation  # cryptography is an extra

            self._record_requested(payloads)
            return self.aggregation_rule.finalize_sum(run_secure_aggregation(self, self.secure_aggregation, payloads))
        if (
            self.stream_aggregation
            and self.aggregation_rule.is_streamable
            and _count_payload_bytes(payloads) > MAX_BUFFERED_REPLY_BYTES
        ):
            return self._aggregate_streaming(payloads)
        return self.aggregation_rule.aggregate(self._collect_replies(payloads, 1))

    def aggregate_by_cluster(self, payloads: Mapping[SiteId, NamedTensors], num_clusters: int) -> dict[int, Aggregate]:
        self._require_visibility("groups", "sums by cluster")
        replies = self._collect_replies(payloads, num_clusters)
        replies_by_cluster = {
            cluster: [r for r in replies if r.update.cluster == cluster] for cluster in range(num_clusters)
        }
        return {
            cluster: self.aggregation_rule.aggregate(cluster_replies)
            for cluster, cluster_replies in replies_by_cluster.items()
            if cluster_replies
        }

    def collect(self, payloads: Mapping[SiteId, NamedTensors]) -> list[Reply]:
        self._require_visibility("each", "single replies")
        return self._collect_replies(payloads)

    def aggregate_replies(self, replies: Sequence[Reply]) -> Aggregate:
        return self.aggregation_rule.aggregate(replies)

    def run_on_coordinator(self, jobs: Sequence[LocalJob]) -> list[JobResult]:
        return self.run_jobs(jobs, self.round)

    def _require_visibility(self, required: Visibility, what: str) -> None:
        if VISIBILITY_ORDER.index(self.visibility) < VISIBILITY_ORDER.index(required):
            raise StrategyContractError(
                f"a strategy with visibility {self.visibility!r} may not read {what}; its `visibility` must be {required!r}"
            )

    def _collect_replies(self, payloads: Mapping[SiteId, NamedTensors], num_clusters: int | None = None) -> list[Reply]:
        """The acceptable replies in the order of arrival."""
        self._record_requested(payloads)
        replies = self.exchange(self.task, payloads, num_clusters)
        acceptable = self._select_acceptable(
            replies, [_update_signature(r) for r in replies], [(r.site, update_norms(r)) for r in replies]
        )
        self.record_accepted([replies[index] for index in acceptable], payloads)
        return [replies[index] for index in acceptable]

    def _aggregate_streaming(self, payloads: Mapping[SiteId, NamedTensors]) -> Aggregate:
        """The weighted mean with one reply in memory at a time. Outliers are known only at the end, so all replies are
        spooled and read again."""
        self._record_requested(payloads)
        stripped, signatures, norms = [], [], []
        with SpooledReplies() as spool:
            for reply, reply_bytes in self._receive_replies(self.task, payloads, 1):
                spool.append(reply_bytes)
                stripped.append(_strip_vectors(reply))
                signatures.append(_update_signature(reply))
                norms.append((reply.site, update_norms(reply)))
            acceptable = self._select_acceptable(stripped, signatures, norms)
            self.record_accepted([stripped[index] for index in acceptable], payloads)
            reread = (
                deserialize_reply(stripped[index].site, spool.read(index), self.compression.decode_uplink)
                for index in acceptable
            )
            return Aggregate.from_replies(reply for reply in reread if isinstance(reply, Reply))

    def _select_acceptable(
        self,
        replies: Sequence[Reply],
        signatures: Sequence[UpdateSignature],
        norms: Sequence[tuple[SiteId, Mapping[str, float]]],
    ) -> list[int]:
        """Indices of replies whose tensor layout equals the majority's and whose norms are no outliers."""
        if not replies:
            return []
        majority = max(signatures, key=signatures.count)
        self.log.vector_shapes = {key: shape for _, key, shape, _ in majority}
        for reply, signature in zip(replies, signatures, strict=True):
            if signature != majority:
                sent_shapes = {key: shape for _, key, shape, _ in signature}
                self.log.quarantine(reply.site, f"sent {sent_shapes} where others sent {self.log.vector_shapes}")
        matching = [index for index, signature in enumerate(signatures) if signature == majority]
        outliers = (
            self.aggregation_rule.outlier_clients([norms[index] for index in matching]) if self.task == "train" else {}
        )
        for site, reason in outliers.items():
            self.log.quarantine(site, reason)
        return [index for index in matching if replies[index].site not in outliers]

    def _record_requested(self, payloads: Mapping[SiteId, NamedTensors]) -> None:
        if self.log.requested:
            raise StrategyContractError(
                "a round makes one request: clients commit their state by round and attempt; call only one of "
                "aggregate, aggregate_by_cluster and collect"
            )
        self.log.requested.extend(payloads)

    def exchange(
        self, task: str, payloads: Mapping[SiteId, NamedTensors], num_clusters: int | None = None
    ) -> list[Reply]:
        """The valid replies of one exchange; `log` has the failures."""
        return [reply for reply, _ in self._receive_replies(task, payloads, num_clusters)]

    def _receive_replies(
        self, task: str, payloads: Mapping[SiteId, NamedTensors], num_clusters: int | None
    ) -> Iterator[tuple[Reply, bytes]]:
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
                already_received.append(_strip_vectors(reply))
                yield reply, reply_bytes

    def record_accepted(self, replies: Sequence[Reply], payloads: Mapping[SiteId, NamedTensors]) -> None:
        """Records accepted and missing replies; raises QuorumNotReachedError if too few were accepted."""
        self.log.accepted.extend(map(_strip_vectors, replies))
        replied = {reply.site for reply in replies}
        for site in payloads:
            if site not in replied:
                self.log.failures.setdefault(site, ClientFailure("no_reply", "no reply"))
        if len(replied) < self.round_policy.quorum:
            raise QuorumNotReachedError(
                f"{len(replied)} of {len(payloads)} sites replied, round.quorum is {self.round_policy.quorum}"
            )

    def _build_message(self, task: str, site: SiteId, vectors: NamedTensors) -> Message:
        return Message(
            task=task,
            round=self.round,
            vectors=vectors,
            attempt=self.attempt,
            last_accepted=self.last_accepted.get(site),
            deadline=self.round_policy.deadline,
            accept_partial=self.round_policy.partial_updates == "keep",
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
        if (
            self.weighting is not None
            and self.secure_aggregation is None
            and reply.weight != client_weight(self.weighting, work)
        ):
            raise ReplyError(f"{site}: claims a weight of {reply.weight:g}, but weighting is {self.weighting!r}")
        if work is not None and work.is_partial and self.round_policy.partial_updates == "drop":
            self.log.failures[site] = ClientFailure("late", f"{work.steps_done} of {work.steps_requested} steps")
            return None
        return reply


def _count_payload_bytes(payloads: Mapping[SiteId, NamedTensors]) -> int:
    """Bytes sent to the clients, an estimate of the bytes that come back."""
    return sum(vector.numel() * vector.element_size() for vectors in payloads.values() for vector in vectors.values())


def _strip_vectors(reply: Reply) -> Reply:
    """The reply with its single numbers, without its vectors."""
    scalars = {key: value for key, value in reply.update.summed.items() if value.dim() == 0}
    return replace(reply, update=replace(reply.update, averaged={}, summed=scalars))


def _update_signature(reply: Reply) -> UpdateSignature:
    sections = (("mean", reply.update.averaged), ("sum", reply.update.summed))
    return tuple(
        (section, key, tuple(vectors[key].shape), vectors[key].dtype)
        for section, vectors in sections
        for key in sorted(vectors)
    )


MAX_BYTES_IN_MEMORY = 128 << 20


class SpooledReplies:
    """Serialized replies, to be read again: in memory up to a limit, on disk beyond it."""

    def __init__(self, max_bytes_in_memory: int = MAX_BYTES_IN_MEMORY) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_bytes_in_memory)  # noqa: SIM115 (closed in __exit__)
        self._extents: list[tuple[int, int]] = []  # (offset, length)

    def append(self, reply_bytes: bytes) -> None:
        offset = self._file.seek(0, 2)
        self._file.write(reply_bytes)
        self._extents.append((offset, len(reply_bytes)))

    def read(self, index: int) -> bytes:
        offset, length = self._extents[index]
        self._file.seek(offset)
        return self._file.read(length)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
