"""Time of a DP-SGD step of the smear CNN, with units of 24 cells, relative to a step without privacy.

Both train the same cells from the same weights in one run, on one thread; the ratio is that of the best of several rounds.
`grad_sample` is Opacus's method with per-example gradients, for comparison. Prints a table, or JSON with --json.
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


def make_trainer_context(size: int) -> TrainerContext:
    n = UNITS * PER_UNIT
    generator = torch.Generator().manual_seed(0)
    pool = ExamplePool(
        torch.rand(n, 3, size, size, generator=generator),
        torch.randint(0, 2, (n,), generator=generator),
        torch.device("cpu"),
        torch.arange(n) // PER_UNIT,
    )

    def make_model() -> torch.nn.Module:
        return CNN72().init_network((3, size, size), 2, 0)

    rows = torch.arange(n)
    config = TrainingConfig(n, "sgd", 0.0, 0.0, lambda round_number: 0.01)
    return TrainerContext(
        make_model=make_model,
        spec=ParameterSpec.from_module(make_model()),
        pool=pool,
        split_indices={"a": SplitIndices(rows, rows[:0], rows[:0])},
        config=config,
        num_classes=2,
        seed=0,
    )


def measure_step_seconds(run: Callable[[], object]) -> float:
    """Seconds of one step, best of several rounds."""
    run()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best / STEPS


def measure(size: int) -> dict[str, float]:
    context = make_trainer_context(size)
    job = TrainJob(context.spec.read_state(context.make_model()).weights, steps=STEPS)
    sequential = SequentialTrainer(context)
    times = {"plain": measure_step_seconds(lambda: sequential.run([TrainRequest("a", 1, 0, job)]))}
    dp_params = DpSgdParams(1.0, 1.0, "patient", UNITS, 1.0, 1 / PER_UNIT)
    modes: tuple[ClippingMode, ...] = ("per_unit", "grad_sample")
    for mode in modes:
        private = DpSgdTrainer(context, {"a": dp_params}, mode)
        times[mode] = measure_step_seconds(
            lambda: private.run([TrainRequest("a", 1, 0, job, is_private=True)])  # noqa: B023
        )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    times_by_size = {size: measure(size) for size in (48, 72)}
    if arguments.json:
        print(json.dumps(times_by_size))
        return
    print(f"one step on {UNITS} units of {PER_UNIT} cells, one thread; limit {LIMIT}x")
    for size, times in times_by_size.items():
        ratios = ", ".join(f"{mode} {times[mode] / times['plain']:.2f}x" for mode in ("per_unit", "grad_sample"))
        print(f"  {size} px: plain {1000 * times['plain']:.0f} ms; private: {ratios}")


if __name__ == "__main__":
    main()
