"""Time and bytes of a secure aggregation: all sites and the coordinator together, on one core.

    .venv/bin/python benchmarks/secure_aggregation.py [--json] [--sites 5 20] [--numbers 10000 1000000]

Each row is a complete aggregation with two dropouts after the share phase (one of 5 sites): signatures, key agreements,
shares, all sites' masks, and unmasking at the coordinator. Bytes are all bytes up and down, relative to those of the ring
codec without masks. The second table shows why the keystream is AES-256-CTR: 4 MB of it are added to a vector.
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

MAX_SECONDS, MAX_BYTES_RATIO = 1.5, 1.3  # for 20 sites x 1,000,000 numbers
DROPOUTS = 2


class PhaseTimer:
    """Seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end_phase(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def measure_aggregation(sites: int, numbers: int) -> dict[str, Any]:
    grid = QuantizationGrid(numbers, 1.0, sites)
    segment = MaskedSegment(numbers, grid.num_bits, narrowest_dtype(grid.num_bits))
    keys = {f"site-{i:03}": Ed25519PrivateKey.generate() for i in range(sites)}
    roster = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    rng = np.random.default_rng(0)
    data = {name: rng.integers(0, grid.num_levels, numbers, dtype=segment.dtype) for name in keys}
    context = b"benchmark, turn 1, attempt 1"
    remaining = list(keys)[: max(reconstruction_threshold(sites), sites - DROPOUTS)]

    timer = PhaseTimer()
    clients = {name: SecAggClient(name, key, roster, context) for name, key in keys.items()}
    server = SecAggServer(context, roster, [segment])
    for name, client in clients.items():
        server.receive_advertisement(name, client.advertise_keys())
    advertisements = server.end_advertise_phase()
    for name, client in clients.items():
        server.receive_encrypted_shares(name, client.share_secrets(advertisements))
    encrypted_shares = server.end_share_phase()
    timer.end_phase("share")
    for name, client in clients.items():  # dropouts have computed their masks, too
        masked = client.mask_vectors(encrypted_shares[name], [(data[name], grid.num_bits)])
        if name in remaining:
            server.receive_masked_vectors(name, masked)
    survivors = server.end_mask_phase()
    timer.end_phase("mask")
    unmask_replies = {name: clients[name].reveal_shares(survivors) for name in survivors}
    for name, reply in unmask_replies.items():
        server.receive_unmask_shares(name, reply)
    (total,) = server.unmask_sums()
    timer.end_phase("unmask")

    expected = (
        sum((data[name].astype(np.uint64) for name in remaining), np.zeros(numbers, np.uint64)) % 2**grid.num_bits
    )
    assert (total == expected).all()
    advertisement_bytes = sum(map(len, advertisements.values()))
    share_bytes = sum(len(share) for by_receiver in encrypted_shares.values() for share in by_receiver.values())
    list_bytes = len(json.dumps(survivors)) * len(survivors)
    overhead = (1 + sites) * advertisement_bytes + 2 * share_bytes + list_bytes + sum(map(len, unmask_replies.values()))
    unmasked_bytes = sites * numbers * grid.dtype.itemsize
    return {
        "sites": sites,
        "numbers": numbers,
        "dtype": segment.dtype,
        **timer.seconds,
        "seconds": sum(timer.seconds.values()),
        "kB beside": overhead / 1000,
        "bytes / plain": (overhead + sites * masked[0].nbytes) / unmasked_bytes,
    }


def measure_ciphers(repeats: int) -> list[dict[str, Any]]:
    ciphers: dict[str, Callable[[], Cipher[Any]]] = {
        "AES-256-CTR": lambda: Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))),
        "AES-128-CTR": lambda: Cipher(algorithms.AES(os.urandom(16)), modes.CTR(bytes(16))),
        "ChaCha20": lambda: Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), None),
    }
    ways = {"pieces": add_in_chunks, "whole": add_at_once}
    best = {(name, way): float("inf") for name in ciphers for way in ways}
    vector = np.ones(2**20, np.uint32)
    for _ in range(repeats):
        for (name, way), best_seconds in best.items():  # alternating, so that a busy machine slows all of them
            stream = ciphers[name]().encryptor()
            start = time.perf_counter()
            ways[way](stream, vector)
            best[name, way] = min(best_seconds, time.perf_counter() - start)
    return [{"cipher": n, "way": way, "GB/s": vector.nbytes / s / 1e9} for (n, way), s in best.items()]


KEYSTREAM, ZEROS = bytearray(CHUNK_BYTES + 16), bytes(CHUNK_BYTES)


def add_in_chunks(stream: Any, vector: np.ndarray) -> None:
    """As in privacy/secure_aggregation/masking.py: in chunks, with one small buffer for all streams."""
    words = np.frombuffer(KEYSTREAM, np.uint32, CHUNK_BYTES // 4)
    for start in range(0, len(vector), len(words)):
        stream.update_into(ZEROS, KEYSTREAM)
        np.add(vector[start : start + len(words)], words, out=vector[start : start + len(words)])


def add_at_once(stream: Any, vector: np.ndarray) -> None:
    """The simplest implementation."""
    np.add(vector, np.frombuffer(stream.update(bytes(vector.nbytes)), np.uint32), out=vector)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sites", type=int, nargs="*", default=[5, 20])
    parser.add_argument("--numbers", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    trials = [[measure_aggregation(s, n) for _ in range(3)] for s in arguments.sites for n in arguments.numbers]
    rows = [min(trial, key=lambda row: row["seconds"]) for trial in trials]
    streams = measure_ciphers(20)
    if arguments.json:
        print(json.dumps({"sums": rows, "ciphers": streams}, indent=1))
        return
    print(
        f"{'sites':>5} {'numbers':>9} {'type':7} {'share':>7} {'mask':>7} {'unmask':>7} {'all':>7} s "
        f"{'overhead kB':>11} {'bytes / plain':>14}"
    )
    for r in rows:
        print(
            f"{r['sites']:5} {r['numbers']:9} {r['dtype']:7} {r['share']:7.3f} {r['mask']:7.3f} {r['unmask']:7.3f} "
            f"{r['seconds']:7.3f}   {r['kB beside']:11.1f} {r['bytes / plain']:14.3f}"
        )
    for r in rows:
        if (r["sites"], r["numbers"]) == (20, 1_000_000):
            verdict = "within" if r["seconds"] <= MAX_SECONDS and r["bytes / plain"] <= MAX_BYTES_RATIO else "OVER"
            print(f"20 sites x 1,000,000 numbers: {verdict} the limits of {MAX_SECONDS} s and {MAX_BYTES_RATIO}x")
    print(f"\n{'cipher':12} {'in':6} {'GB/s':>6}")
    for c in streams:
        print(f"{c['cipher']:12} {c['way']:6} {c['GB/s']:6.2f}")


if __name__ == "__main__":
    main()
