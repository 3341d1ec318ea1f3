"""Secure aggregation of one round in four exchanges, on any engine: advertise, share, train, unmask.

An update is encoded as integers. Its vectors, scaled by weight / max_examples, clipped and rounded, take at most 32 bits
per number; the weight, statistics, single numbers and sums are fixed-point numbers of 64 bits. The coordinator learns
only the sums, not the work of single clients: `Aggregate.work_by_client` is empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pipeline.aggregation.exchange import RoundExchange
from pipeline.codecs.fixed_point import QuantizationGrid, decode_fixed_point, encode_fixed_point
from pipeline.core.errors import MessageError, QuorumNotReachedError, ReplyError
from pipeline.core.parameters import NamedTensors
from pipeline.protocol.messages import (
    ADVERTISE_TASK,
    SHARE_TASK,
    UNMASK_TASK,
    Aggregate,
    ClientUpdate,
    Reply,
    SiteId,
)
from privacy.secure_aggregation.masking import MaskedSegment
from privacy.secure_aggregation.server import SecAggServer

FIXED_POINT_SCALE = 2**24  # 64-bit fixed-point numbers are multiples of 1 / FIXED_POINT_SCALE
ENCRYPTED_SHARE_PREFIX = "encrypted_share/"


@dataclass(frozen=True)
class UpdateLayout:
    """The layout of an update. Both sides derive it from the study before the first round."""

    mean_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    sum_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    num_clients: int
    max_update_norm: float  # 2-norm that updates are clipped to
    max_examples: int  # the largest weight of a client

    @classmethod
    def from_update(
        cls, update: ClientUpdate, *, num_clients: int, max_update_norm: float, max_examples: int
    ) -> UpdateLayout:
        def shapes_of(vectors: NamedTensors) -> tuple[tuple[str, tuple[int, ...]], ...]:
            return tuple((key, tuple(vectors[key].shape)) for key in sorted(vectors))

        return cls(
            mean_shapes=shapes_of(update.averaged),
            sum_shapes=shapes_of(update.summed),
            num_clients=num_clients,
            max_update_norm=max_update_norm,
            max_examples=max_examples,
        )

    @cached_property
    def grid(self) -> QuantizationGrid:
        return QuantizationGrid.create_finest(
            sum(math.prod(shape) for _, shape in self._clipped_shapes), self.max_update_norm, self.num_clients
        )

    @cached_property
    def segments(self) -> list[MaskedSegment]:
        num_exact = 1 + sum(math.prod(shape) for _, shape in (*self._exact_shapes, *self.sum_shapes))
        return [MaskedSegment(self.grid.n, self.grid.num_bits), MaskedSegment(num_exact, 64, "uint64")]

    @property
    def _clipped_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(key, shape) for key, shape in self.mean_shapes if _is_clipped_vector(key, shape)]

    @property
    def _exact_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(key, shape) for key, shape in self.mean_shapes if not _is_clipped_vector(key, shape)]

    def encode_update(
        self, update: ClientUpdate, weight: float, max_weight: float, generator: torch.Generator
    ) -> list[np.ndarray]:
        """A client's update as integers, ready to be masked."""
        layout = UpdateLayout.from_update(
            update,
            num_clients=self.num_clients,
            max_update_norm=self.max_update_norm,
            max_examples=self.max_examples,
        )
        if layout != self:
            raise MessageError(
                "this update has another layout than the study's strategy sends; do both sides run the same version?"
            )
        if weight > max_weight:
            raise MessageError(
                f"the site's weight {weight:g} is above privacy.secure_aggregation.max_examples ({max_weight:g}); raise it"
            )
        relative_weight = weight / max_weight
        vector = _flatten([update.averaged[key] * relative_weight for key, _ in self._clipped_shapes])
        exact_means = [update.averaged[key].double() * relative_weight for key, _ in self._exact_shapes]
        exact = torch.cat(
            [
                torch.tensor([relative_weight], dtype=torch.float64),
                _flatten(exact_means),
                _flatten([update.summed[key].double() for key, _ in self.sum_shapes]),
            ]
        )
        if not (
            bool(torch.isfinite(vector).all())
            and float(exact.abs().max()) < 2**62 / FIXED_POINT_SCALE / self.num_clients
        ):
            raise MessageError("an update that is not finite cannot be summed; lower local.lr or check the site's data")
        ring_values = encode_fixed_point(vector.float(), self.grid, generator).numpy().astype(np.uint32)
        return [ring_values, (exact * FIXED_POINT_SCALE).round().to(torch.int64).numpy().view(np.uint64)]

    def decode_aggregate(self, sums: list[np.ndarray], clients: list[SiteId]) -> Aggregate:
        vector = decode_fixed_point(torch.from_numpy(sums[0].astype(np.int64)), self.grid)
        exact = torch.from_numpy(sums[1].view(np.int64).copy()).double() / FIXED_POINT_SCALE
        means = _split_flat(vector, self._clipped_shapes)
        exact_tensors = _split_flat(
            exact[1:].float(),
            [*((f"mean/{k}", s) for k, s in self._exact_shapes), *((f"sum/{k}", s) for k, s in self.sum_shapes)],
        )
        means |= {key: exact_tensors[f"mean/{key}"] for key, _ in self._exact_shapes}
        return Aggregate.from_sums(
            means, float(exact[0]), {key: exact_tensors[f"sum/{key}"] for key, _ in self.sum_shapes}, clients
        )


def _is_clipped_vector(key: str, shape: tuple[int, ...]) -> bool:
    return key != "stats" and len(shape) == 1


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors]) if tensors else torch.zeros(0)


def _split_flat(flat: Tensor, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for _, shape in shapes]) if shapes else ()
    return {key: part.view(shape) for (key, shape), part in zip(shapes, parts, strict=True)}


@dataclass(frozen=True)
class SecureAggregationSetup:
    """What a study's secure aggregation needs at both sides."""

    update_layout: UpdateLayout
    public_keys: Mapping[SiteId, bytes]
    study_hash: str
    min_clients: int = 3  # so that a coordinator that colludes with some clients cannot isolate another

    def round_context(self, round_number: int, attempt: int) -> bytes:
        return json.dumps([self.study_hash, round_number, attempt]).encode()


def run_secure_aggregation(
    exchange: RoundExchange, setup: SecureAggregationSetup, payloads: Mapping[SiteId, NamedTensors]
) -> Aggregate:
    exchange.record_requested(payloads)
    public_keys = {site: key for site, key in setup.public_keys.items() if site in payloads}
    server = SecAggServer(
        setup.round_context(exchange.round, exchange.attempt),
        public_keys,
        setup.update_layout.segments,
        setup.min_clients,
    )
    _run_phase(
        exchange,
        ADVERTISE_TASK,
        {site: {} for site in payloads},
        lambda site, sums: server.receive_advertisement(site, _require_bytes(sums, "advert")),
    )
    adverts = {f"advert/{site}": bytes_to_tensor(advert) for site, advert in server.end_advertise_phase().items()}
    advertisers = [key.removeprefix("advert/") for key in adverts]
    _run_phase(
        exchange,
        SHARE_TASK,
        dict.fromkeys(advertisers, adverts),
        lambda site, sums: server.receive_encrypted_shares(
            site,
            {
                key.removeprefix(ENCRYPTED_SHARE_PREFIX): _require_bytes(sums, key)
                for key in sums
                if key.startswith(ENCRYPTED_SHARE_PREFIX)
            },
        ),
    )
    encrypted_shares = {
        site: {
            f"{ENCRYPTED_SHARE_PREFIX}{sender}": bytes_to_tensor(encrypted_share)
            for sender, encrypted_share in received.items()
        }
        for site, received in server.end_share_phase().items()
    }
    _run_phase(
        exchange,
        "train",
        {site: {**payloads[site], **shares} for site, shares in encrypted_shares.items()},
        lambda site, sums: server.receive_masked_vectors(site, _require_masked_vectors(site, sums)),
    )
    survivors = server.end_mask_phase()
    survivor_payload = {"survivors": bytes_to_tensor(json.dumps(survivors).encode())}
    _run_phase(
        exchange,
        UNMASK_TASK,
        dict.fromkeys(survivors, survivor_payload),
        lambda site, sums: server.receive_unmask_shares(site, _require_bytes(sums, "shares")),
    )
    try:
        sums = server.unmask_sums()
    except ReplyError as error:
        raise QuorumNotReachedError(str(error)) from error
    exchange.log.clear_failures(survivors)  # a client that only failed to unmask is still part of the sum
    replies = [Reply(site, exchange.task, exchange.round, exchange.attempt, ClientUpdate(), 1.0) for site in survivors]
    exchange.record_accepted(replies, payloads)
    return setup.update_layout.decode_aggregate(sums, survivors)


def _run_phase(
    exchange: RoundExchange,
    task: str,
    payloads: Mapping[SiteId, NamedTensors],
    handle_reply: Callable[[SiteId, NamedTensors], None],
) -> None:
    for reply, _ in exchange.exchange(task, payloads):
        try:
            handle_reply(reply.site, reply.update.summed)
        except ReplyError as error:
            exchange.log.quarantine(reply.site, error)


def bytes_to_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _require_bytes(sums: NamedTensors, key: str) -> bytes:
    value = sums.get(key)
    if value is None or value.dtype != torch.uint8:
        raise ReplyError(f"a part of secure aggregation, {key!r}, is missing; do both sides run the same version?")
    return value.numpy().tobytes()


def _require_masked_vectors(site: SiteId, sums: NamedTensors) -> list[np.ndarray]:
    ring, exact = sums.get("ring"), sums.get("exact")
    if ring is None or exact is None or ring.dtype != torch.int32 or exact.dtype != torch.int64:
        raise ReplyError(f"{site}: sent no masked numbers; do both sides run the same version?")
    return [ring.numpy().view(np.uint32), exact.numpy().view(np.uint64)]
