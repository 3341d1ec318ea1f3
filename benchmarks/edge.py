"""Speed of inference at the edge, compared with torch on the same machine in the same run.

    make bench        or        .venv/bin/python benchmarks/edge.py [--json]

One thread, one image at a time: the network in eager torch, and the exported graph in onnxruntime in fp32 and int8. The
graph computes more than the network (features and image measures for the out-of-distribution guard), which is included.
Then fields, end to end: reading the file, finding about a hundred cells, test-time augmentation with eight views of each,
the guard, the counts. The network is hardly trained, because speed does not depend on its weights.
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
from deploy.inference.onnx_session import run_session
from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import ImageResult
from deploy.slide.reader import SlideReader
from pipeline.coordinator.run_folder import RunFolder
from pipeline.runs.score_saved_model import load_model
from pipeline.runs.simulation import run_simulation
from pipeline.study.schema import Study
from privacy.ledger import keys
from sites.data.renderer.field import render_field

MIN_SPEEDUP = {"fp32": 2.0, "int8": 3.0}  # images per second, relative to torch
MAX_FIELD_SECONDS = 1.0
CAMERA_SIZES = ((640, 480), (1920, 1440))  # pixels of the same field
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


def measure_seconds(
    functions: dict[str, Callable[[], object]], repeats: int = 60, num_calls: int = 20
) -> dict[str, float]:
    """Median seconds of one call; the functions alternate, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(20):
            function()
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(num_calls):
                function()
            times[name].append((time.perf_counter() - start) / num_calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def encode_jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()


def measure(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    study = Study.model_validate(STUDY)
    run_folder = RunFolder.create(folder / "run", study)
    run_simulation(study, run_folder)
    torch.set_num_threads(1)
    key = keys.generate_key()
    trust_store = TrustStore(folder / "trust.json")
    trust_store.add("bench", keys.public_hex(key))
    bundle = ModelBundle.open(
        export_bundle(run_folder, "global", folder / "bundle", key, with_int8=True).folder, trust_store
    )
    module, _ = load_model(run_folder, "global")
    image = np.random.default_rng(0).integers(0, 256, (1, 48, 48, 3), dtype=np.uint8)
    x = torch.from_numpy(image)

    def run_torch() -> object:
        with torch.inference_mode():
            return module(x.permute(0, 3, 1, 2).float().div_(255)).softmax(1)

    graphs = {p: BundleRuntime(bundle, p)._session for p in ("fp32", "int8")}
    seconds = measure_seconds(
        {"torch": run_torch} | {p: (lambda s=s: run_session(s, image)) for p, s in graphs.items()}
    )
    field = Image.fromarray(render_field(5, types=[0] * 100, num_unlabeled=0).image)
    jpegs = {f"{w} x {h}": encode_jpeg(field.resize((w, h), Image.Resampling.BICUBIC)) for w, h in CAMERA_SIZES}
    readers = {
        p: SlideReader(runtime, runtime.calibration.find_point())
        for p in graphs
        if (runtime := BundleRuntime(bundle, p))
    }

    def read(reader: SlideReader, data: bytes) -> ImageResult:
        return reader.read_image(read_image_bytes(data, "f")[0])

    field_seconds = {
        camera: measure_seconds({p: (lambda r=r, data=data: read(r, data)) for p, r in readers.items()}, 7, 1)
        for camera, data in jpegs.items()
    }
    cells = {camera: len(read(readers["fp32"], data).cells) for camera, data in jpegs.items()}
    return {
        "microseconds": {name: round(1e6 * s, 1) for name, s in seconds.items()},
        "times_torch": {p: round(seconds["torch"] / seconds[p], 2) for p in graphs},
        "limits": MIN_SPEEDUP,
        "fields": {
            camera: {
                "cells": cells[camera],
                "seconds": {p: round(s, 3) for p, s in by_precision.items()},
                "limit": MAX_FIELD_SECONDS,
            }
            for camera, by_precision in field_seconds.items()
        },
    }


def main() -> None:
    import cv2

    cv2.setNumThreads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder))
    if parser.parse_args().json:
        print(json.dumps(report, indent=1))
        return
    for name, us in report["microseconds"].items():
        ratio = report["times_torch"].get(name)
        ratio_text = f"   {ratio:5.2f} times torch (at least {report['limits'][name]:g})" if ratio else ""
        print(f"{name:6} {us:9.1f} us per image{ratio_text}")
    for camera, field in report["fields"].items():
        for name, s in field["seconds"].items():
            print(
                f"{name:6} {s:9.3f} s per field of {camera} pixels and {field['cells']} cells (at most {MAX_FIELD_SECONDS:g})"
            )


if __name__ == "__main__":
    main()
