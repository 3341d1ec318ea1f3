"""How vectors travel in a study: which codecs they pass on their way up and down, and what error feedback keeps.

Encoded are the flat float32 vectors of an update's `mean` and of what a site is sent to train from. `stats` never are
(a variance must not be rounded below zero), nor are sums, single numbers, and what is sent to be judged. The
coordinator keeps its exact model; a site's update is the difference to the copy that the site received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.codecs.base import ANY, Chain, Layout, decode, encode, feeds_back
from pipeline.core.errors import BadMessage
from pipeline.core.seeding import generator
from pipeline.protocol.messages import Memory, Message, Packed, SiteId, Update, Vectors
from pipeline.protocol.serialization import message_bytes

_RESIDUAL = "residual/"


@dataclass(frozen=True)
class Wire:
    up: Chain = ()
    down: Chain = ()
    layout: Layout = ANY
    seed: int = 0

    def seal(
        self, update: Update, kept: Memory, site: SiteId, turn: int
    ) -> tuple[dict[str, Packed], dict[str, Tensor]]:
        """The encoded means, and what they lost, to be added to the next ones. `kept` is what the last ones lost."""
        packed: dict[str, Packed] = {}
        lost: dict[str, Tensor] = {}
        for key in _encodable(update.mean) if self.up else ():
            x, name = update.mean[key], f"{_RESIDUAL}{key}"
            if feeds_back(self.up) and name in kept:
                x = x + kept[name]
            packed[key] = encode(self.up, x, self.layout, generator(self.seed, site, turn, "up", key))
            if feeds_back(self.up):
                lost[name] = x - decode(self.up, packed[key], self.layout)
        return packed, lost

    def parcels(self, messages: Mapping[SiteId, Message]) -> dict[SiteId, bytes]:
        """A vector that goes to many is encoded once."""
        done: dict[int, Packed] = {}
        out = {}
        for site, message in messages.items():
            keys = _encodable(message.vectors) if self.down and message.task == "train" else []
            for key in keys:
                x = message.vectors[key]
                if id(x) not in done:
                    dice = generator(self.seed, message.turn, "down", len(done))
                    done[id(x)] = encode(self.down, x, self.layout, dice)
            out[site] = message_bytes(message, {key: done[id(message.vectors[key])] for key in keys})
        return out

    def open_up(self, packed: Packed) -> Tensor:
        return self._open(self.up, packed)

    def open_down(self, packed: Packed) -> Tensor:
        return self._open(self.down, packed)

    def _open(self, chain: Chain, packed: Packed) -> Tensor:
        if not chain:
            raise BadMessage("a vector came encoded, but this study names no codec for that way")
        if not 0 <= packed.n <= sum(self.layout.sizes):  # before anything of that length is made
            raise BadMessage(f"an encoded vector claims {packed.n} numbers; the model has {sum(self.layout.sizes)}")
        return decode(chain, packed, self.layout)


PLAIN = Wire()


def residuals(memory: Memory) -> dict[str, Tensor]:
    return {key: value for key, value in memory.items() if key.startswith(_RESIDUAL)}


def without_residuals(memory: Memory) -> Memory:
    return {key: value for key, value in memory.items() if not key.startswith(_RESIDUAL)}


def _encodable(vectors: Vectors) -> list[str]:
    return [k for k, v in vectors.items() if "stats" not in k.split("/") and v.dim() == 1 and v.dtype == torch.float32]
