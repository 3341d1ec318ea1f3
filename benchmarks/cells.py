"""What decoding and augmentation add to training on cells, as a ratio within one run.

    make bench        or        .venv/bin/python benchmarks/cells.py [--json]

The packaged study `schistocytes`: its cell file is read and decoded once, and every batch is augmented. Beside it the
same rounds on tensors that already lie in memory, without augmentation: (load + rounds x augmented) / (rounds x plain).
The real cells are used where they are (HEMOFED_DATA, ../shared/data), else a cell file of rendered ones is made.
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
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import find_study

LIMIT = 1.15
FILE = "chula_rbc12.npz"


def cell_file(folder: Path) -> Path:
    """The real one, or one of rendered cells in the same form."""
    for place in (os.environ.get("HEMOFED_DATA"), Path(__file__).parents[2] / "shared" / "data"):
        if place and (Path(place) / FILE).is_file():
            return Path(place)
    import cv2

    from sites.data.synthetic_smear import SyntheticSmear

    data = SyntheticSmear(cells=12_000, task="types").load(None, 0)
    packed = [
        cv2.imencode(".jpg", x[::-1].transpose(1, 2, 0), [cv2.IMWRITE_JPEG_QUALITY, 90])[1] for x in data.x.numpy()
    ]
    patient = data.keys["patient"].codes.numpy()
    np.savez(
        folder / FILE,
        jpeg=np.concatenate(packed),
        offset=np.cumsum([0, *map(len, packed)]),
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
        root = cell_file(folder)
        study = load_study(find_study("schistocytes"))
        began = time.perf_counter()
        study.data.load(root, study.seed)
        load = time.perf_counter() - began
        plain = study.model_copy(update={"augmentation": type(study.augmentation)()})
        sims = {"augmented": start(study, folder / "a", root), "plain": start(plain, folder / "p", root)}
        best = {kind: float("inf") for kind in sims}
        for turn in range(1, repeats + 2):
            for kind, (sim, progress) in sims.items():  # in turns, so that a busy machine slows both
                began = time.perf_counter()
                after = sim.round_loop._run_round(replace(progress, round=turn))
                spent = after.seconds - progress.seconds
                sims[kind] = (sim, after)
                if turn > 1:  # the first is warm-up
                    best[kind] = min(best[kind], spent, time.perf_counter() - began)
    rounds = study.rounds
    ratio = (load + rounds * best["augmented"]) / (rounds * best["plain"])
    return {"cells": str(root), "rounds": rounds, "load": load, **best, "ratio": ratio, "limit": LIMIT}


def rendering() -> float:
    """Rendered cells a second on one core, windows cut: best of ten."""
    import cv2

    from sites.data.renderer.field import crop_rendered_cells, render_field
    from sites.data.renderer.sampling_plan import plan_fields

    cv2.setNumThreads(1)
    sittings = plan_fields(1000, 13, 0.15, 2)
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        for s in sittings:
            crop_rendered_cells(render_field(np.random.default_rng(s.seed), s.profile, s.types, s.num_unlabeled))
        best = min(best, time.perf_counter() - began)
    return sum(len(s.types) for s in sittings) / best


def start(study: Study, path: Path, root: Path) -> tuple[Simulation, Any]:
    quick = study.model_copy(update={"evaluation": study.evaluation.model_copy(update={"every": 1000})})
    sim = build_simulation(quick, RunFolder.create(path, quick), root, None, lambda record: None)
    return sim, sim.round_loop.start_run(sim.trainer_context.spec.read_state(sim.trainer_context.make_model()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    row = measure(3) | {"rendered_per_second": rendering()}
    if as_json:
        print(json.dumps(row, indent=1))
        return
    verdict = "within" if row["ratio"] <= row["limit"] else "OVER"
    print(
        f"cells  load {row['load']:.2f} s once, round {row['augmented']:.2f} s, without augmentation {row['plain']:.2f} s: "
        f"{row['ratio']:.2f}x over {row['rounds']} rounds, {verdict} the limit of {row['limit']}"
    )
    print(f"render {row['rendered_per_second']:.0f} cells a second on one core, 72 x 72 pixels, cut from whole fields")


if __name__ == "__main__":
    main()
