"""Time of encoding and decoding a vector on one thread, compared with a plain NumPy implementation of 4-bit QSGD.

    .venv/bin/python benchmarks/codecs.py [--json] [--numbers 10000000]

The NumPy implementation also scales by block and packs two codes into a byte. It alternates with the codecs, so that the
ratio of times holds on any machine. MB/s: float32 bytes per second, encoded and decoded, with the checks of
`pipeline.codecs.base`.
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

NUMPY_QSGD = "numpy 4 bits"
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


def encode_and_decode_numpy(x: np.ndarray, rng: np.random.Generator) -> tuple[int, np.ndarray]:
    """4-bit QSGD; returns the number of encoded bytes and the decoded vector."""
    blocks = np.pad(x, (0, -len(x) % 256)).reshape(-1, 256)
    scales = np.abs(blocks).max(1, keepdims=True)
    y = blocks / np.where(scales > 0, scales, 1) * 7
    low = np.floor(y)
    codes = (low + (rng.random(y.shape, dtype=np.float32) < y - low) + 7).astype(np.uint8).reshape(-1)
    packed = codes[::2] | codes[1::2] << 4
    back = np.empty_like(codes)
    back[::2], back[1::2] = packed & 15, packed >> 4
    decoded = (back.reshape(-1, 256).astype(np.float32) - 7) / 7 * scales
    return packed.nbytes + scales.nbytes, decoded.reshape(-1)[: len(x)]


def measure(numbers: int, repeats: int) -> list[dict[str, Any]]:
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(0)).mul_(0.01)
    generator, numpy_rng = torch.Generator().manual_seed(1), np.random.default_rng(1)
    layout = VectorLayout(num_clients=10)

    def encode_and_decode(chain: CodecChain) -> int:
        encoded = encode_vector(chain, x, layout, generator)
        decode_vector(chain, encoded, layout)
        return sum(part.numel() * part.element_size() for part in encoded.parts.values())

    codecs: dict[str, Callable[[], int]] = {NUMPY_QSGD: lambda: encode_and_decode_numpy(x.numpy(), numpy_rng)[0]}
    codecs |= {name: partial(encode_and_decode, chain) for name, chain in CHAINS.items()}
    num_bytes = {name: run() for name, run in codecs.items()}  # also the warm-up
    times: dict[str, list[float]] = {name: [] for name in codecs}
    for _ in range(repeats):
        for name, run in codecs.items():  # alternating, so that a busy machine slows all of them
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    best = {name: min(values) for name, values in times.items()}
    return [
        {
            "codec": name,
            "numbers": numbers,
            "MB/s": 4e-6 * numbers / seconds,
            "bytes": num_bytes[name] / (4 * numbers),
            "time": seconds / best[NUMPY_QSGD],
        }
        for name, seconds in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--numbers", type=int, nargs="*", default=[100_000, 10_000_000])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for n in arguments.numbers for row in measure(n, repeats=max(5, min(100, 20_000_000 // n)))]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'numbers':>10} {'codec':16} {'MB/s':>6} {'bytes / float32':>16} {'time / ' + NUMPY_QSGD:>19}")
    for r in rows:
        print(f"{r['numbers']:10} {r['codec']:16} {r['MB/s']:6.0f} {r['bytes']:16.4f} {r['time']:19.2f}")


if __name__ == "__main__":
    main()
