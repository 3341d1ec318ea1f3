"""What a federated round costs beside a plain PyTorch loop over the same batches, as a ratio within one run.

    make bench        or        .venv/bin/python benchmarks/rounds.py [--json]

Both sides train 10 sites x 6,000 images, batch 50, one epoch, from the same weights on the same index order; ours
includes everything a round does: messages to bytes and back, weighing, averaging, record and checkpoint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
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


def study(model: str, images: int) -> Study:
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


def plain(sim: Simulation) -> Callable[[], None]:
    """As anybody would write it: one module, one optimiser a site, a loop over batches; then the mean."""
    pool, spec = sim.trainer_context.pool, sim.trainer_context.spec
    module = sim.trainer_context.make_model()
    start = [p.detach().clone() for p in module.parameters()]
    sites = sim.dataset.sites

    def order(site: SiteId) -> list[torch.Tensor]:
        ticket = TrainRequest(site, 1, 0, TrainJob(torch.zeros(spec.num_parameters), epochs=1))
        assert isinstance(ticket.job, TrainJob)
        return list(
            iterate_batches(
                sim.trainer_context,
                ticket,
                StepBudget.from_job(ticket.job, sim.trainer_context.split_indices[site], sim.trainer_context.config),
            )
        )

    orders = {site: order(site) for site in sites}

    def run() -> None:
        total = [torch.zeros_like(p) for p in start]
        for site in sites:
            with torch.no_grad():
                for p, w in zip(module.parameters(), start, strict=True):
                    p.copy_(w)
            optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
            for index in orders[site]:
                optimiser.zero_grad()
                F.cross_entropy(module(pool.x[index]), pool.y[index]).backward()
                optimiser.step()
            for t, p in zip(total, module.parameters(), strict=True):
                t += p.detach() / len(sites)

    return run


def ours(sim: Simulation) -> Callable[[], None]:
    progress = [sim.round_loop.start_run(sim.trainer_context.spec.read_state(sim.trainer_context.make_model()))]

    def run() -> None:
        from dataclasses import replace

        progress[0] = sim.round_loop._run_round(replace(progress[0], round=progress[0].round + 1))

    return run


def ratio(model: str, images: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        s = study(model, images)
        sim = build_simulation(s, RunFolder.create(Path(folder) / "run", s), None, None, lambda record: None)
        contestants = {"plain": plain(sim), "hemofed": ours(sim)}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(repeats + 1):
            for name, run in contestants.items():  # in turns, so that a busy machine slows both
                began = time.perf_counter()
                run()
                if turn:  # the first is warm-up
                    times[name].append(time.perf_counter() - began)
    best = {name: min(values) for name, values in times.items()}
    trainer = sim.round_loop.environment["trainer"]
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
    rows = [ratio("mlp", 60_000, 7), ratio("cnn28", 60_000, 4)]
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
