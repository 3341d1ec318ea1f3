"""Update compression: the codecs of the uplink and the downlink, and error feedback.

Codecs encode the flat float32 vectors in an update's `averaged` and in training messages. They never encode `stats`
(rounding could make a variance negative), sums, single numbers and models sent for evaluation. The coordinator keeps its
exact model; a client's delta counts from the copy that it received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.codecs.base import (
    UNKNOWN_LAYOUT,
    CodecChain,
    EncodedVector,
    VectorLayout,
    decode_vector,
    encode_vector,
    has_error_feedback,
)
from pipeline.core.errors import MessageError
from pipeline.core.parameters import NamedTensors
from pipeline.core.seeding import seeded_generator
from pipeline.protocol.messages import ClientState, ClientUpdate, Message, SiteId
from pipeline.protocol.serialization import serialize_message

_RESIDUAL_PREFIX = "residual/"


@dataclass(frozen=True)
class UpdateCompression:
    """The codec chains of a study, for updates (uplink) and for models (downlink)."""

    uplink: CodecChain = ()
    downlink: CodecChain = ()
    layout: VectorLayout = UNKNOWN_LAYOUT
    seed: int = 0

    def compress_update(
        self, update: ClientUpdate, old_residuals: ClientState, site: SiteId, round_number: int
    ) -> tuple[dict[str, EncodedVector], dict[str, Tensor]]:
        """The encoded vectors, and the new residuals. Error feedback adds the old residuals before encoding."""
        encoded: dict[str, EncodedVector] = {}
        new_residuals: dict[str, Tensor] = {}
        for key in _compressible_keys(update.averaged) if self.uplink else ():
            x, name = update.averaged[key], f"{_RESIDUAL_PREFIX}{key}"
            if has_error_feedback(self.uplink) and name in old_residuals:
                x = x + old_residuals[name]
            encoded[key] = encode_vector(
                self.uplink, x, self.layout, seeded_generator(self.seed, site, round_number, "up", key)
            )
            if has_error_feedback(self.uplink):
                new_residuals[name] = x - decode_vector(self.uplink, encoded[key], self.layout)
        return encoded, new_residuals

    def serialize_messages(self, messages: Mapping[SiteId, Message]) -> dict[SiteId, bytes]:
        """Encodes a vector that is sent to several sites once."""
        encoded_by_id: dict[int, EncodedVector] = {}
        serialized = {}
        for site, message in messages.items():
            keys = _compressible_keys(message.vectors) if self.downlink and message.task == "train" else []
            for key in keys:
                x = message.vectors[key]
                if id(x) not in encoded_by_id:
                    rng = seeded_generator(self.seed, message.round, "down", len(encoded_by_id))
                    encoded_by_id[id(x)] = encode_vector(self.downlink, x, self.layout, rng)
            serialized[site] = serialize_message(
                message, {key: encoded_by_id[id(message.vectors[key])] for key in keys}
            )
        return serialized

    def decode_uplink(self, encoded: EncodedVector) -> Tensor:
        return self._decode(self.uplink, encoded)

    def decode_downlink(self, encoded: EncodedVector) -> Tensor:
        return self._decode(self.downlink, encoded)

    def _decode(self, chain: CodecChain, encoded: EncodedVector) -> Tensor:
        if not chain:
            raise MessageError("a vector came encoded, but this study names no codec for this direction")
        if not 0 <= encoded.n <= sum(self.layout.tensor_sizes):  # before allocating this length
            raise MessageError(
                f"an encoded vector claims {encoded.n} numbers; the model has {sum(self.layout.tensor_sizes)}"
            )
        return decode_vector(chain, encoded, self.layout)


NO_COMPRESSION = UpdateCompression()


def select_residuals(client_state: ClientState) -> dict[str, Tensor]:
    return {key: value for key, value in client_state.items() if key.startswith(_RESIDUAL_PREFIX)}


def drop_residuals(client_state: ClientState) -> ClientState:
    return {key: value for key, value in client_state.items() if not key.startswith(_RESIDUAL_PREFIX)}


def _compressible_keys(vectors: NamedTensors) -> list[str]:
    return [k for k, v in vectors.items() if "stats" not in k.split("/") and v.dim() == 1 and v.dtype == torch.float32]
