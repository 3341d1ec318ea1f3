"""The `ClientRequests` of a strategy: exchanges its payloads for replies and aggregates them by the study's rule."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from pipeline.aggregation.exchange import RequestLog, RoundExchange, strip_vectors
from pipeline.aggregation.rules import WEIGHTED_MEAN, AggregationRule, update_norms
from pipeline.core.errors import StrategyContractError
from pipeline.core.parameters import NamedTensors
from pipeline.protocol.messages import Aggregate, Reply, SiteId, Visibility
from pipeline.protocol.serialization import deserialize_reply
from pipeline.protocol.tasks import JobResult, LocalJob

if TYPE_CHECKING:
    from pipeline.aggregation.secure_aggregation import SecureAggregationSetup

# (mean or sum, key, shape, dtype) of every tensor in an update
UpdateSignature = tuple[tuple[str, str, tuple[int, ...], torch.dtype], ...]
MAX_BUFFERED_REPLY_BYTES = 256 << 20  # bytes of replies up to which streaming aggregation still buffers them all
VISIBILITY_ORDER: Sequence[Visibility] = ("totals", "groups", "each")


@dataclass(frozen=True)
class RoundRequest:
    """The `ClientRequests` of one attempt of a round, and what came of it in `log`."""

    exchange: RoundExchange
    run_jobs: Callable[[Sequence[LocalJob], int], list[JobResult]]
    visibility: Visibility = "each"  # what the strategy declared
    aggregation_rule: AggregationRule = WEIGHTED_MEAN
    secure_aggregation: SecureAggregationSetup | None = None  # None: the coordinator sees single replies
    stream_aggregation: bool = False  # spool replies to disk and add them one by one, to bound the memory

    @property
    def log(self) -> RequestLog:
        return self.exchange.log

    def aggregate(self, payloads: Mapping[SiteId, NamedTensors]) -> Aggregate:
        if self.secure_aggregation is not None:
            from pipeline.aggregation.secure_aggregation import run_secure_aggregation  # cryptography is an extra

            aggregate = run_secure_aggregation(self.exchange, self.secure_aggregation, payloads)
            return self.aggregation_rule.finalize_sum(aggregate)
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
        return self.run_jobs(jobs, self.exchange.round)

    def _require_visibility(self, required: Visibility, what: str) -> None:
        if VISIBILITY_ORDER.index(self.visibility) < VISIBILITY_ORDER.index(required):
            raise StrategyContractError(
                f"a strategy with visibility {self.visibility!r} may not read {what}; its `visibility` must be {required!r}"
            )

    def _collect_replies(self, payloads: Mapping[SiteId, NamedTensors], num_clusters: int | None = None) -> list[Reply]:
        """The acceptable replies in the order of arrival."""
        self.exchange.record_requested(payloads)
        replies = [reply for reply, _ in self.exchange.exchange(self.exchange.task, payloads, num_clusters)]
        acceptable = self._select_acceptable(
            replies, [_update_signature(r) for r in replies], [(r.site, update_norms(r)) for r in replies]
        )
        self.exchange.record_accepted([replies[index] for index in acceptable], payloads)
        return [replies[index] for index in acceptable]

    def _aggregate_streaming(self, payloads: Mapping[SiteId, NamedTensors]) -> Aggregate:
        """The weighted mean with one reply in memory at a time. Outliers are known only at the end, so all replies are
        spooled and read again."""
        self.exchange.record_requested(payloads)
        stripped, signatures, norms = [], [], []
        with SpooledReplies() as spool:
            for reply, reply_bytes in self.exchange.exchange(self.exchange.task, payloads, 1):
                spool.append(reply_bytes)
                stripped.append(strip_vectors(reply))
                signatures.append(_update_signature(reply))
                norms.append((reply.site, update_norms(reply)))
            acceptable = self._select_acceptable(stripped, signatures, norms)
            self.exchange.record_accepted([stripped[index] for index in acceptable], payloads)
            reread = (
                deserialize_reply(stripped[index].site, spool.read(index), self.exchange.compression.decode_uplink)
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
            self.aggregation_rule.outlier_clients([norms[index] for index in matching])
            if self.exchange.task == "train"
            else {}
        )
        for site, reason in outliers.items():
            self.log.quarantine(site, reason)
        return [index for index in matching if replies[index].site not in outliers]


def _count_payload_bytes(payloads: Mapping[SiteId, NamedTensors]) -> int:
    """Bytes sent to the clients, an estimate of the bytes that come back."""
    return sum(vector.numel() * vector.element_size() for vectors in payloads.values() for vector in vectors.values())


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
