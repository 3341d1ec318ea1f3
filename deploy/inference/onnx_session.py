"""onnxruntime, without its telemetry: by itself it writes a device's number into the user's cache and calls home."""

from __future__ import annotations

import os
from typing import Any


def load_onnxruntime() -> Any:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when it is loaded, so nothing else may import it first
    import onnxruntime as found

    return found


def create_session(graph: bytes, num_threads: int = 1) -> Any:
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = num_threads, 1
    options.log_severity_level = 3
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
