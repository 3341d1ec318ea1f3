"""Time of a simulated federated round relative to a plain PyTorch loop over the same batches, within one run.

    make bench        or        .venv/bin/python benchmarks/rounds.py [--json]

Both train 10 sites x 6,000 images, batch size 50, one epoch, from the same weights with the same order of examples.
hemofed's time includes everything in a round: serialization, weighting, averaging, record and checkpoint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from pipeline.coordinator.run_folder import RunFolder
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import TrainJob
from pipeline.runs.simulation import Simulation, build_simulation
from pipeline.study.schema import Study
from sites.training.base import StepBudget, TrainRequest, iterate_batches

LIMITS = {"mlp": 0.7, "cnn28": 1.05}


def make_study(model: str, images: int) -> Study:
    return Study.model_validate(
        {
            "name": f"bench-{model}",
            "rounds": 100,
            "data": {"name": "fashion_mnist", "val": 0.0, "limit": images},
            "sites": {"count": 10},
            "model": model,
            "local": {"lr": 0.01, "batch_size": 50, "epochs": 1},
            "evaluation": {"evaluate_at": "coordinator", "every": 100},
        }
    )


def make_plain_loop(simulation: Simulation) -> Callable[[], None]:
    """One module, one optimizer per site, a loop over batches, then the mean of the weights."""
    pool, spec = simulation.trainer_context.pool, simulation.trainer_context.spec
    module = simulation.trainer_context.make_model()
    initial = [p.detach().clone() for p in module.parameters()]
    sites = simulation.dataset.sites

    def list_batches(site: SiteId) -> list[torch.Tensor]:
        request = TrainRequest(site, 1, 0, TrainJob(torch.zeros(spec.num_parameters), epochs=1))
        assert isinstance(request.job, TrainJob)
        return list(
            iterate_batches(
                simulation.trainer_context,
                request,
                StepBudget.from_job(
                    request.job, simulation.trainer_context.split_indices[site], simulation.trainer_context.config
                ),
            )
        )

    batches = {site: list_batches(site) for site in sites}

    def run() -> None:
        total = [torch.zeros_like(p) for p in initial]
        for site in sites:
            with torch.no_grad():
                for p, w in zip(module.parameters(), initial, strict=True):
                    p.copy_(w)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for rows in batches[site]:
                optimizer.zero_grad()
                F.cross_entropy(module(pool.x[rows]), pool.y[rows]).backward()
                optimizer.step()
            for t, p in zip(total, module.parameters(), strict=True):
                t += p.detach() / len(sites)

    return run


def make_federated_round(simulation: Simulation) -> Callable[[], None]:
    run_states = [
        simulation.round_loop.start_run(
            simulation.trainer_context.spec.read_state(simulation.trainer_context.make_model())
        )
    ]

    def run() -> None:
        last = run_states[-1]
        run_states[:] = [simulation.round_loop._run_round(replace(last, round=last.round + 1))]

    return run


def measure(model: str, images: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        study = make_study(model, images)
        simulation = build_simulation(
            study, RunFolder.create(Path(folder) / "run", study), None, None, lambda record: None
        )
        functions = {"plain": make_plain_loop(simulation), "hemofed": make_federated_round(simulation)}
        times: dict[str, list[float]] = {name: [] for name in functions}
        for repeat in range(repeats + 1):
            for name, run in functions.items():  # alternating, so that a busy machine slows both
                start = time.perf_counter()
                run()
                if repeat:  # the first is warm-up
                    times[name].append(time.perf_counter() - start)
    best = {name: min(values) for name, values in times.items()}
    trainer = simulation.round_loop.environment["trainer"]
    return {
        "model": model,
        "images": images,
        "trainer": trainer,
        **best,
        "ratio": best["hemofed"] / best["plain"],
        "limit": LIMITS[model],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = [measure("mlp", 60_000, 7), measure("cnn28", 60_000, 4)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for r in rows:
        verdict = "within" if r["ratio"] <= r["limit"] else "OVER"
        print(
            f"{r['model']:6} {r['trainer']:8} plain {r['plain']:.2f} s, hemofed {r['hemofed']:.2f} s: {r['ratio']:.2f}x, {verdict} the limit of {r['limit']}"
        )


if __name__ == "__main__":
    main()
