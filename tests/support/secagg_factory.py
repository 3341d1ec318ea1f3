"""Clients, server and random vectors of one secure aggregation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.secure_aggregation.client import SecAggClient
from privacy.secure_aggregation.masking import MaskedSegment
from privacy.secure_aggregation.server import SecAggServer

NAMES = [f"site-{i:02}" for i in range(20)]
KEYS = {name: Ed25519PrivateKey.generate() for name in NAMES}
ROSTER = {name: key.public_key().public_bytes_raw() for name, key in KEYS.items()}
CONTEXT = b"study 8f3a, turn 7, attempt 1"
NEXT_CONTEXT = b"study 8f3a, turn 7, attempt 2"
LAYOUT = (MaskedSegment(5, 19), MaskedSegment(3, 40, "uint64"))

Vectors = list[np.ndarray]


@dataclass
class SecAggRound:
    clients: dict[str, SecAggClient]
    server: SecAggServer
    data: dict[str, Vectors]
    layout: Sequence[MaskedSegment]

    def mask(self, site: str, encrypted_shares: Mapping[str, bytes]) -> Vectors:
        return self.clients[site].mask_vectors(encrypted_shares, add_bits(self.data[site], self.layout))

    def run_until_shared(self) -> dict[str, dict[str, bytes]]:
        """receiver -> sender -> encrypted shares"""
        for name, advertisement in advertise_all(self.clients).items():
            self.server.receive_advertisement(name, advertisement)
        advertisements = self.server.end_advertise_phase()
        for name, client in self.clients.items():
            self.server.receive_encrypted_shares(name, client.share_secrets(advertisements))
        return self.server.end_share_phase()

    def run_until_masked(self, dropouts: Collection[str] = ()) -> list[str]:
        """The survivors."""
        for name, encrypted_shares in self.run_until_shared().items():
            if name not in dropouts:
                self.server.receive_masked_vectors(name, self.mask(name, encrypted_shares))
        return self.server.end_mask_phase()

    def reveal_all(self, survivors: Collection[str]) -> None:
        for name in survivors:
            self.server.receive_unmask_shares(name, self.clients[name].reveal_shares(list(survivors)))


def make_round(n: int, layout: Sequence[MaskedSegment] = LAYOUT, context: bytes = CONTEXT) -> SecAggRound:
    names = NAMES[:n]
    data = {name: make_vectors(layout, i) for i, name in enumerate(names)}
    return SecAggRound(make_clients(names, context), SecAggServer(context, ROSTER, layout), data, layout)


def make_clients(
    names: Collection[str], context: bytes = CONTEXT, min_participants: int = 3
) -> dict[str, SecAggClient]:
    return {name: SecAggClient(name, KEYS[name], ROSTER, context, min_participants) for name in names}


def advertise_all(clients: Mapping[str, SecAggClient]) -> dict[str, bytes]:
    return {name: client.advertise_keys() for name, client in clients.items()}


def make_vectors(layout: Sequence[MaskedSegment], seed: int) -> Vectors:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**s.bits - 1, s.num_values, s.dtype, endpoint=True) for s in layout]


def add_bits(vectors: Vectors, layout: Sequence[MaskedSegment]) -> list[tuple[np.ndarray, int]]:
    return [(vector, segment.bits) for vector, segment in zip(vectors, layout, strict=True)]


def plain_sum(vectors: Collection[Vectors], layout: Sequence[MaskedSegment]) -> list[list[int]]:
    """In Python's integers."""
    return [
        [sum(int(each[k][i]) for each in vectors) % 2**s.bits for i in range(s.num_values)]
        for k, s in enumerate(layout)
    ]


def to_lists(vectors: Sequence[np.ndarray]) -> list[list[int]]:
    return [vector.tolist() for vector in vectors]
