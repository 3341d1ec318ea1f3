"""What privacy costs a training step of the smear CNN: units of 24 cells, the private trainer against the plain loop.

Both train the same cells from the same weights in one run, on one thread; the ratio is of the best of several rounds.
`hooks` is Opacus's way by per-example gradients, for comparison. Prints a table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from models.networks.cnn import CNN72
from pipeline.core.parameters import ParameterSpec
from pipeline.protocol.tasks import TrainJob
from sites.data.pool import ExamplePool, SplitIndices
from sites.training.base import TrainerContext, TrainingConfig, TrainRequest
from sites.training.dp_sgd import DpSgdTrainer
from sites.training.sequential import SequentialTrainer
from sites.training.unit_clipping import ClippingMode, DpSgdParams

UNITS, PER_UNIT, STEPS, ROUNDS = 20, 24, 3, 5
LIMIT = 1.5


def bench(size: int) -> TrainerContext:
    n = UNITS * PER_UNIT
    dice = torch.Generator().manual_seed(0)
    pool = ExamplePool(
        torch.rand(n, 3, size, size, generator=dice),
        torch.randint(0, 2, (n,), generator=dice),
        torch.device("cpu"),
        torch.arange(n) // PER_UNIT,
    )
    make = lambda: CNN72().init_network((3, size, size), 2, 0)  # noqa: E731
    rows = torch.arange(n)
    recipe = TrainingConfig(n, "sgd", 0.0, 0.0, lambda turn: 0.01)
    return TrainerContext(
        make, ParameterSpec.from_module(make()), pool, {"a": SplitIndices(rows, rows[:0], rows[:0])}, recipe, 2, 0
    )


def seconds(run: Callable[[], object]) -> float:
    """Of one step."""
    run()
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best / STEPS


def measure(size: int) -> dict[str, float]:
    world = bench(size)
    start = world.spec.read_state(world.make_model()).weights
    job = TrainJob(start, steps=STEPS)
    plain = SequentialTrainer(world)
    found = {"plain": seconds(lambda: plain.run([TrainRequest("a", 1, 0, job)]))}
    terms = DpSgdParams(1.0, 1.0, "patient", UNITS, 1.0, 1 / PER_UNIT)
    modes: tuple[ClippingMode, ...] = ("per_unit", "grad_sample")
    for mode in modes:
        private = DpSgdTrainer(world, {"a": terms}, mode)
        found[mode] = seconds(lambda: private.run([TrainRequest("a", 1, 0, job, is_private=True)]))  # noqa: B023
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {size: measure(size) for size in (48, 72)}
    if asked.json:
        print(json.dumps(found))
        return
    print(f"a step on {UNITS} units of {PER_UNIT} cells, one thread; limit {LIMIT}x")
    for size, times in found.items():
        ratios = ", ".join(f"{mode} {times[mode] / times['plain']:.2f}x" for mode in ("per_unit", "grad_sample"))
        print(f"  {size} px: plain {1000 * times['plain']:.0f} ms; private: {ratios}")


if __name__ == "__main__":
    main()
