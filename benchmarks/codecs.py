"""What encoding and decoding a vector costs on one thread, beside 4-bit QSGD as one would write it in NumPy.

    .venv/bin/python benchmarks/codecs.py [--json] [--numbers 10000000]

The peer scales by block and packs two codes a byte too, and runs in turn with ours, so the ratio of times holds on any
machine. MB/s are those of the float32 vector, through the checks of `pipeline.codecs.base`, there and back.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from pipeline.codecs.base import CodecChain, VectorLayout, decode_vector, encode_vector
from pipeline.codecs.fixed_point import FixedPointCodec
from pipeline.codecs.fp16 import Fp16Codec
from pipeline.codecs.qsgd import Qsgd
from pipeline.codecs.randk import RandK
from pipeline.codecs.topk import TopK

PEER = "numpy 4 bits"
CHAINS: dict[str, CodecChain] = {
    "qsgd 1 bit": (Qsgd(bits=1),),
    "qsgd 2 bits": (Qsgd(bits=2),),
    "qsgd 4 bits": (Qsgd(),),
    "qsgd 4, norm": (Qsgd(scale="norm"),),
    "qsgd 8 bits": (Qsgd(bits=8),),
    "fp16": (Fp16Codec(),),
    "topk 1%": (TopK(),),
    "topk 1%, qsgd 4": (TopK(), Qsgd()),
    "randk 1%": (RandK(),),
    "ring": (FixedPointCodec(max_norm=1.0),),
}


def peer(x: np.ndarray, dice: np.random.Generator) -> tuple[int, np.ndarray]:
    """4-bit QSGD there and back, in the obvious way: the bytes that would travel, and the vector."""
    blocks = np.pad(x, (0, -len(x) % 256)).reshape(-1, 256)
    scales = np.abs(blocks).max(1, keepdims=True)
    y = blocks / np.where(scales > 0, scales, 1) * 7
    low = np.floor(y)
    codes = (low + (dice.random(y.shape, dtype=np.float32) < y - low) + 7).astype(np.uint8).reshape(-1)
    packed = codes[::2] | codes[1::2] << 4
    back = np.empty_like(codes)
    back[::2], back[1::2] = packed & 15, packed >> 4
    decoded = (back.reshape(-1, 256).astype(np.float32) - 7) / 7 * scales
    return packed.nbytes + scales.nbytes, decoded.reshape(-1)[: len(x)]


def measure(numbers: int, repeats: int) -> list[dict[str, Any]]:
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(0)).mul_(0.01)
    dice, peers_dice, layout = torch.Generator().manual_seed(1), np.random.default_rng(1), VectorLayout(num_clients=10)

    def ours(chain: CodecChain) -> int:
        packed = encode_vector(chain, x, layout, dice)
        decode_vector(chain, packed, layout)
        return sum(part.numel() * part.element_size() for part in packed.parts.values())

    contestants: dict[str, Callable[[], int]] = {PEER: lambda: peer(x.numpy(), peers_dice)[0]}
    contestants |= {name: partial(ours, chain) for name, chain in CHAINS.items()}
    size = {name: run() for name, run in contestants.items()}  # and warm-up
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():  # in turns, so that a busy machine slows all
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    best = {name: min(values) for name, values in times.items()}
    return [
        {
            "codec": name,
            "numbers": numbers,
            "MB/s": 4e-6 * numbers / seconds,
            "bytes": size[name] / (4 * numbers),
            "time": seconds / best[PEER],
        }
        for name, seconds in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--numbers", type=int, nargs="*", default=[100_000, 10_000_000])
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for n in given.numbers for row in measure(n, repeats=max(5, min(100, 20_000_000 // n)))]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'numbers':>10} {'codec':16} {'MB/s':>6} {'bytes / float32':>16} {'time / ' + PEER:>19}")
    for r in rows:
        print(f"{r['numbers']:10} {r['codec']:16} {r['MB/s']:6.0f} {r['bytes']:16.4f} {r['time']:19.2f}")


if __name__ == "__main__":
    main()
