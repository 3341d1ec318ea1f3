"""Static int8 quantization of convolutions and dense layers by onnxruntime, with scales from rendered images.

The int8 model is kept only if it classifies like the fp32 model.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deploy.export.onnx_graph import run_graph
from deploy.inference.metrics import compute_auroc, compute_balanced_accuracy
from deploy.inference.onnx_session import load_onnxruntime
from deploy.inference.resize import ImageBatch

NUM_CALIBRATION_IMAGES = 256
MAX_BALANCED_ACCURACY_LOSS, MAX_AUROC_LOSS = 0.005, 0.005
MAX_CHANGED_FRACTION = 0.01  # of images with another class, where labels are unknown


@dataclass(frozen=True)
class QuantizedModel:
    graph: bytes | None
    metrics: dict[str, float | int | str | None]  # for the card
    reason: str | None = None  # why there is no graph


def quantize_model(
    graph: bytes, images: ImageBatch, labels: NDArray[np.int64] | None, positive_index: int | None
) -> QuantizedModel:
    """The first NUM_CALIBRATION_IMAGES set the scales, the others compare int8 with fp32; `labels` if they are known."""
    int8_graph = _quantize_static(graph, images[:NUM_CALIBRATION_IMAGES])
    test_images = images[NUM_CALIBRATION_IMAGES:]
    fp32_probabilities, int8_probabilities = run_graph(graph, test_images)[0], run_graph(int8_graph, test_images)[0]
    changed_fraction = float((fp32_probabilities.argmax(1) != int8_probabilities.argmax(1)).mean())
    metrics: dict[str, float | int | str | None] = {
        "images": len(test_images),
        "largest_difference": float(np.abs(fp32_probabilities - int8_probabilities).max()),
        "other_class": changed_fraction,
        "bytes": len(int8_graph),
        "bytes_fp32": len(graph),
    }
    reasons = []
    if labels is None or positive_index is None:
        if changed_fraction > MAX_CHANGED_FRACTION:
            reasons.append(f"{100 * changed_fraction:.1f} % of {len(test_images)} images got another class")
    else:
        test_labels = labels[NUM_CALIBRATION_IMAGES:]
        losses = {
            "balanced accuracy": (
                compute_balanced_accuracy(fp32_probabilities, test_labels)
                - compute_balanced_accuracy(int8_probabilities, test_labels),
                MAX_BALANCED_ACCURACY_LOSS,
            ),
            "AUROC": (
                compute_auroc(fp32_probabilities, test_labels, positive_index)
                - compute_auroc(int8_probabilities, test_labels, positive_index),
                MAX_AUROC_LOSS,
            ),
        }
        for name, (loss, max_loss) in losses.items():
            metrics[f"lost_{name.replace(' ', '_').lower()}"] = loss
            if loss > max_loss:
                reasons.append(f"{name} on {len(test_images)} rendered cells fell by {loss:.4f}")
    if reasons:
        return QuantizedModel(None, metrics, "; ".join(reasons))
    return QuantizedModel(int8_graph, metrics)


def _quantize_static(graph: bytes, images: ImageBatch) -> bytes:
    load_onnxruntime()
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class CalibrationBatchReader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = [{"image": images[start : start + 32]} for start in range(0, len(images), 32)]

        def get_next(self) -> dict[str, ImageBatch] | None:
            return self.batches.pop(0) if self.batches else None

    with tempfile.TemporaryDirectory() as folder, _silence_logging():
        source_path, prepared_path, int8_path = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "small"))
        source_path.write_bytes(graph)
        quant_pre_process(str(source_path), str(prepared_path), skip_symbolic_shape=True)
        dense_nodes = [node.name for node in onnx.load(prepared_path).graph.node if node.op_type == "Gemm"]
        quantize_static(
            str(prepared_path),
            str(int8_path),
            CalibrationBatchReader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=["Conv", "Gemm"],
            nodes_to_exclude=dense_nodes[-1:],  # the head: it is small, and its errors go straight into the output
        )
        return int8_path.read_bytes()


@contextlib.contextmanager
def _silence_logging() -> Iterator[None]:
    logger = logging.getLogger()
    previous_level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(previous_level)
