"""What decoding and augmentation add to training on cells, as a ratio within one run.

    make bench        or        .venv/bin/python benchmarks/cells.py [--json]

The packaged study `schistocytes` reads and decodes its cell file once and augments every batch. The baseline is the same
rounds on tensors in memory without augmentation: (load_seconds + rounds x augmented) / (rounds x plain). If there are no real
cells (HEMOFED_DATA, ../shared/data), rendered ones are written to a cell file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.simulation import Simulation, build_simulation
from pipeline.study.schema import Study
from pipeline.study.toml_file import find_study, load_study

LIMIT = 1.15
FILE_NAME = "chula_rbc12.npz"


def find_cell_folder(folder: Path) -> Path:
    """The folder of the real cell file, or `folder` with a file of rendered cells in the same format."""
    for candidate in (os.environ.get("HEMOFED_DATA"), Path(__file__).parents[2] / "shared" / "data"):
        if candidate and (Path(candidate) / FILE_NAME).is_file():
            return Path(candidate)
    import cv2

    from sites.data.synthetic_smear import SyntheticSmear

    data = SyntheticSmear(cells=12_000, task="types").load(None, 0)
    jpegs = [
        cv2.imencode(".jpg", x[::-1].transpose(1, 2, 0), [cv2.IMWRITE_JPEG_QUALITY, 90])[1] for x in data.x.numpy()
    ]
    patient = data.keys["patient"].codes.numpy()
    np.savez(
        folder / FILE_NAME,
        jpeg=np.concatenate(jpegs),
        offset=np.cumsum([0, *map(len, jpegs)]),
        labels=data.y.numpy(),
        class_names=np.array(data.classes),
        field=data.keys["field"].codes.numpy(),
        group=patient,
        batch=patient % 4,
        fold=patient // 4 % 4,
    )
    return folder


def measure(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = find_cell_folder(folder)
        study = load_study(find_study("schistocytes"))
        start = time.perf_counter()
        study.data.load(root, study.seed)
        load_seconds = time.perf_counter() - start
        plain = study.model_copy(update={"augmentation": type(study.augmentation)()})
        runs = {"augmented": start_run(study, folder / "a", root), "plain": start_run(plain, folder / "p", root)}
        best = {kind: float("inf") for kind in runs}
        for round_number in range(1, repeats + 2):
            for kind, (simulation, run_state) in runs.items():  # alternating, so that a busy machine slows both
                start = time.perf_counter()
                next_state = simulation.round_loop._run_round(replace(run_state, round=round_number))
                seconds = next_state.seconds - run_state.seconds
                runs[kind] = (simulation, next_state)
                if round_number > 1:  # the first is warm-up
                    best[kind] = min(best[kind], seconds, time.perf_counter() - start)
    rounds = study.rounds
    ratio = (load_seconds + rounds * best["augmented"]) / (rounds * best["plain"])
    return {"cells": str(root), "rounds": rounds, "load": load_seconds, **best, "ratio": ratio, "limit": LIMIT}


def measure_rendering() -> float:
    """Rendered and cropped cells per second on one core, best of ten runs."""
    import cv2

    from sites.data.renderer.field import crop_rendered_cells, render_field
    from sites.data.renderer.sampling_plan import plan_fields

    cv2.setNumThreads(1)
    field_plans = plan_fields(1000, 13, 0.15, 2)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for plan in field_plans:
            crop_rendered_cells(
                render_field(np.random.default_rng(plan.seed), plan.profile, plan.types, plan.num_unlabeled)
            )
        best = min(best, time.perf_counter() - start)
    return sum(len(plan.types) for plan in field_plans) / best


def start_run(study: Study, path: Path, root: Path) -> tuple[Simulation, Any]:
    study = study.model_copy(update={"evaluation": study.evaluation.model_copy(update={"every": 1000})})
    simulation = build_simulation(study, RunFolder.create(path, study), root, None, lambda record: None)
    context = simulation.trainer_context
    return simulation, simulation.round_loop.start_run(context.spec.read_state(context.make_model()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    row = measure(3) | {"rendered_per_second": measure_rendering()}
    if as_json:
        print(json.dumps(row, indent=1))
        return
    verdict = "within" if row["ratio"] <= row["limit"] else "OVER"
    print(
        f"cells  load {row['load']:.2f} s once, round {row['augmented']:.2f} s, without augmentation {row['plain']:.2f} s: "
        f"{row['ratio']:.2f}x over {row['rounds']} rounds, {verdict} the limit of {row['limit']}"
    )
    print(f"render {row['rendered_per_second']:.0f} cells per second on one core, 72 x 72 pixels, cropped from fields")


if __name__ == "__main__":
    main()
