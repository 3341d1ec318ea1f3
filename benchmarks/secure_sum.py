"""What a secure sum computes and sends: all sites and the coordinator together, on one core.

    .venv/bin/python benchmarks/secure_sum.py [--json] [--sites 5 20] [--numbers 10000 1000000]

Each row is a whole sum with two dropouts after sharing (one of 5 sites): signatures, key agreements, shares, all sites' masks, and the
coordinator's unmasking. Bytes are all that travels up and down, beside those of the plain ring codec's whole numbers.
The second table is why the keystream is AES-256-CTR: 4 MB of it added to a vector.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from pipeline.codecs.fixed_point import QuantizationGrid
from privacy.secure_aggregation.client import SecAggClient
from privacy.secure_aggregation.masking import CHUNK_BYTES, MaskedSegment, narrowest_dtype
from privacy.secure_aggregation.server import SecAggServer
from privacy.secure_aggregation.shamir import reconstruction_threshold

SECONDS, BYTES = 1.5, 1.3  # limits for 20 sites x 1,000,000 numbers
DROPOUTS = 2


class Stages:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self._last = now


def one_sum(sites: int, numbers: int) -> dict[str, Any]:
    grid = QuantizationGrid(numbers, 1.0, sites)
    segment = MaskedSegment(numbers, grid.num_bits, narrowest_dtype(grid.num_bits))
    keys = {f"site-{i:03}": Ed25519PrivateKey.generate() for i in range(sites)}
    roster = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    dice = np.random.default_rng(0)
    data = {name: dice.integers(0, grid.num_levels, numbers, dtype=segment.dtype) for name in keys}
    context, alive = (
        b"benchmark, turn 1, attempt 1",
        list(keys)[: max(reconstruction_threshold(sites), sites - DROPOUTS)],
    )

    stages = Stages()
    members = {name: SecAggClient(name, key, roster, context) for name, key in keys.items()}
    gathering = SecAggServer(context, roster, [segment])
    for name, member in members.items():
        gathering.receive_advertisement(name, member.advertise_keys())
    adverts = gathering.end_advertise_phase()
    for name, member in members.items():
        gathering.receive_encrypted_shares(name, member.share_secrets(adverts))
    parcels = gathering.end_share_phase()
    stages.end("share")
    for name, member in members.items():  # dropouts too have done their work
        masked = member.mask_vectors(parcels[name], [(data[name], grid.num_bits)])
        if name in alive:
            gathering.receive_masked_vectors(name, masked)
    survivors = gathering.end_mask_phase()
    stages.end("mask")
    answers = {name: members[name].reveal_shares(survivors) for name in survivors}
    for name, answer in answers.items():
        gathering.receive_unmask_shares(name, answer)
    (total,) = gathering.unmask_sums()
    stages.end("unmask")

    wanted = sum((data[name].astype(np.uint64) for name in alive), np.zeros(numbers, np.uint64)) % 2**grid.num_bits
    assert (total == wanted).all()
    advert_bytes = sum(map(len, adverts.values()))
    parcel_bytes = sum(len(parcel) for each in parcels.values() for parcel in each.values())
    list_bytes = len(json.dumps(survivors)) * len(survivors)
    overhead = (1 + sites) * advert_bytes + 2 * parcel_bytes + list_bytes + sum(map(len, answers.values()))
    plain = sites * numbers * grid.dtype.itemsize
    return {
        "sites": sites,
        "numbers": numbers,
        "dtype": segment.dtype,
        **stages.seconds,
        "seconds": sum(stages.seconds.values()),
        "kB beside": overhead / 1000,
        "bytes / plain": (overhead + sites * masked[0].nbytes) / plain,
    }


def ciphers(repeats: int) -> list[dict[str, Any]]:
    contestants: dict[str, Callable[[], Cipher[Any]]] = {
        "AES-256-CTR": lambda: Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))),
        "AES-128-CTR": lambda: Cipher(algorithms.AES(os.urandom(16)), modes.CTR(bytes(16))),
        "ChaCha20": lambda: Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), None),
    }
    ways = {"pieces": in_pieces, "whole": at_once}
    best = {(name, way): float("inf") for name in contestants for way in ways}
    vector = np.ones(2**20, np.uint32)
    for _ in range(repeats):
        for (name, way), so_far in best.items():  # in turns, so that a busy machine slows all
            stream = contestants[name]().encryptor()
            began = time.perf_counter()
            ways[way](stream, vector)
            best[name, way] = min(so_far, time.perf_counter() - began)
    return [{"cipher": n, "way": way, "GB/s": vector.nbytes / s / 1e9} for (n, way), s in best.items()]


ROOM, ZEROS = bytearray(CHUNK_BYTES + 16), bytes(CHUNK_BYTES)


def in_pieces(stream: Any, vector: np.ndarray) -> None:
    """As privacy/secure_aggregation/masking.py does, in one small room for all streams."""
    words = np.frombuffer(ROOM, np.uint32, CHUNK_BYTES // 4)
    for at in range(0, len(vector), len(words)):
        stream.update_into(ZEROS, ROOM)
        np.add(vector[at : at + len(words)], words, out=vector[at : at + len(words)])


def at_once(stream: Any, vector: np.ndarray) -> None:
    """As one would write it first."""
    np.add(vector, np.frombuffer(stream.update(bytes(vector.nbytes)), np.uint32), out=vector)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sites", type=int, nargs="*", default=[5, 20])
    parser.add_argument("--numbers", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    given = parser.parse_args()
    trials = [[one_sum(s, n) for _ in range(3)] for s in given.sites for n in given.numbers]
    rows = [min(trial, key=lambda row: row["seconds"]) for trial in trials]
    streams = ciphers(20)
    if given.json:
        print(json.dumps({"sums": rows, "ciphers": streams}, indent=1))
        return
    print(
        f"{'sites':>5} {'numbers':>9} {'type':7} {'share':>7} {'mask':>7} {'unmask':>7} {'all':>7} s "
        f"{'kB beside':>10} {'bytes / plain':>14}"
    )
    for r in rows:
        print(
            f"{r['sites']:5} {r['numbers']:9} {r['dtype']:7} {r['share']:7.3f} {r['mask']:7.3f} {r['unmask']:7.3f} "
            f"{r['seconds']:7.3f}   {r['kB beside']:10.1f} {r['bytes / plain']:14.3f}"
        )
    for r in rows:
        if (r["sites"], r["numbers"]) == (20, 1_000_000):
            verdict = "within" if r["seconds"] <= SECONDS and r["bytes / plain"] <= BYTES else "OVER"
            print(f"20 sites x 1,000,000 numbers: {verdict} the limits of {SECONDS} s and {BYTES}x")
    print(f"\n{'cipher':12} {'in':6} {'GB/s':>6}")
    for c in streams:
        print(f"{c['cipher']:12} {c['way']:6} {c['GB/s']:6.2f}")


if __name__ == "__main__":
    main()
