"""What a bedside machine does in a second, beside torch on the same machine, in one run.

    make bench        or        .venv/bin/python benchmarks/edge.py [--json]

One thread, one image at a time: the network in eager torch, the exported graph in onnxruntime with floats and with eight
bits. The graph does more than the network (the guard's traits and measures), and is timed with all of it. Then whole
fields, end to end: reading the file, finding about a hundred cells, eight looks at each, the guard, the counts.
Weights are those of a new network: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from deploy.bundle.bundle import ModelBundle
from deploy.bundle.trust_store import TrustStore
from deploy.export.export import export_bundle
from deploy.imaging.images import read_image_bytes
from deploy.inference.runtime import OUTPUT_NAMES, BundleRuntime
from deploy.slide.reader import ImageResult, SlideReader
from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.score_saved_model import load_model
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from privacy.ledger import keys
from sites.data.renderer.field import render_field

FLOATS, EIGHT_BITS, FIELD = 2.0, 3.0, 1.0  # at least so many times torch's images a second; seconds a field, at most
CAMERAS = ((640, 480), (1920, 1440))  # pixels of the same field
STUDY = {
    "name": "edge-bench",
    "rounds": 1,
    "sites": {"count": 2},
    "model": "cnn72",
    "data": {"name": "synthetic_smear", "cells": 800, "patients": 40, "size": 48, "schistocytes": 0.3},
    "local": {"lr": 0.001, "batch_size": 16, "steps": 5, "optimizer": "adamw"},
    "augmentation": {"flip": True, "rotate": 180},
    "evaluation": {"evaluate_at": "sites", "positive_class": "schistocyte"},
}


def timed(rivals: dict[str, Callable[[], object]], turns: int = 60, each: int = 20) -> dict[str, float]:
    """Median seconds of one call; in turns, so that a busy machine is busy for all."""
    found: dict[str, list[float]] = {name: [] for name in rivals}
    for act in rivals.values():
        for _ in range(20):
            act()
    for _ in range(turns):
        for name, act in rivals.items():
            began = time.perf_counter()
            for _ in range(each):
                act()
            found[name].append((time.perf_counter() - began) / each)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


def bench(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    study = Study.model_validate(STUDY)
    finished = RunFolder.create(folder / "run", study)
    run_simulation(study, finished)
    torch.set_num_threads(1)
    key = keys.generate_key()
    trust = TrustStore(folder / "trust.json")
    trust.add("bench", keys.public_hex(key))
    bundle = ModelBundle.open(export_bundle(finished, "global", folder / "bundle", key, with_int8=True).folder, trust)
    module, _ = load_model(finished, "global")
    image = np.random.default_rng(0).integers(0, 256, (1, 48, 48, 3), dtype=np.uint8)
    x = torch.from_numpy(image)

    def eager() -> object:
        with torch.inference_mode():
            return module(x.permute(0, 3, 1, 2).float().div_(255)).softmax(1)

    graphs = {p: BundleRuntime(bundle, p)._session for p in ("fp32", "int8")}
    seconds = timed(
        {"torch": eager} | {p: (lambda s=s: s.run(OUTPUT_NAMES, {"image": image})) for p, s in graphs.items()}
    )
    small = Image.fromarray(render_field(5, types=[0] * 100, num_unlabeled=0).image)
    photographs = {f"{w} x {h}": jpeg(small.resize((w, h), Image.Resampling.BICUBIC)) for w, h in CAMERAS}
    readers = {
        p: SlideReader(runtime, runtime.calibration.find_point())
        for p in graphs
        if (runtime := BundleRuntime(bundle, p))
    }

    def read(reader: SlideReader, data: bytes) -> ImageResult:
        return reader.read_image(read_image_bytes(data, "f")[0])

    whole = {
        camera: timed({p: (lambda r=r, data=data: read(r, data)) for p, r in readers.items()}, 7, 1)
        for camera, data in photographs.items()
    }
    cells = {camera: len(read(readers["fp32"], data).cells) for camera, data in photographs.items()}
    return {
        "microseconds": {name: round(1e6 * s, 1) for name, s in seconds.items()},
        "times_torch": {p: round(seconds["torch"] / seconds[p], 2) for p in graphs},
        "limits": {"fp32": FLOATS, "int8": EIGHT_BITS},
        "fields": {
            camera: {"cells": cells[camera], "seconds": {p: round(s, 3) for p, s in took.items()}, "limit": FIELD}
            for camera, took in whole.items()
        },
    }


def main() -> None:
    import cv2

    cv2.setNumThreads(1)
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--json", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        found = bench(Path(folder))
    if args.parse_args().json:
        print(json.dumps(found, indent=1))
        return
    for name, us in found["microseconds"].items():
        ratio = found["times_torch"].get(name)
        told = f"   {ratio:5.2f} times torch (at least {found['limits'][name]:g})" if ratio else ""
        print(f"{name:6} {us:9.1f} us an image{told}")
    for camera, field in found["fields"].items():
        for name, s in field["seconds"].items():
            print(f"{name:6} {s:9.3f} s a field of {camera} pixels and {field['cells']} cells (at most {FIELD:g})")


if __name__ == "__main__":
    main()
