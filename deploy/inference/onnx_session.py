"""Loads onnxruntime with its telemetry off, which would store a device id in the user's cache and send it home."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTPUT_NAMES = ["probabilities", "features", "quality_measures"]  # of the ONNX graph
ModelOutputs = tuple[NDArray[np.float32], ...]  # probabilities (N, C), features (N, D), quality_measures (N, Q)


def load_onnxruntime() -> Any:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read at import time, so every import must go through here
    import onnxruntime

    return onnxruntime


def create_session(graph: bytes, num_threads: int = 1) -> Any:
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = 3
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, images: NDArray[np.uint8]) -> ModelOutputs:
    return tuple(session.run(OUTPUT_NAMES, {"image": images}))
