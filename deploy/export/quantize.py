"""Whole numbers of 8 bits instead of floats in the layers that cost time: static quantisation by onnxruntime.

Scales are set by images that are nobody's. The result is kept only if it answers as the original does.
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

from deploy.export.onnx_graph import answers
from deploy.inference.metrics import area, balanced
from deploy.inference.onnx_session import onnxruntime

CALIBRATED_ON = 256  # images
LOSES_BALANCED, LOSES_AUROC = 0.005, 0.005
DIFFERS = 0.01  # of the images may get another class, where nobody knows the right one
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Quantised:
    graph: bytes | None
    told: dict[str, float | int | str | None]  # for the card
    reason: str | None = None  # why there is none


def quantised(graph: bytes, images: Images, labels: NDArray[np.int64] | None, positive: int | None) -> Quantised:
    """`labels` of the images, where they show what the model tells apart. The first ones set scales, the rest judge."""
    small = _quantise(graph, images[:CALIBRATED_ON])
    rest = images[CALIBRATED_ON:]
    before, after = answers(graph, rest)[0], answers(small, rest)[0]
    differing = float((before.argmax(1) != after.argmax(1)).mean())
    told: dict[str, float | int | str | None] = {
        "images": len(rest),
        "largest_difference": float(np.abs(before - after).max()),
        "other_class": differing,
        "bytes": len(small),
        "bytes_fp32": len(graph),
    }
    reasons = []
    if labels is None or positive is None:
        if differing > DIFFERS:
            reasons.append(f"{100 * differing:.1f} % of {len(rest)} images got another class")
    else:
        truth = labels[CALIBRATED_ON:]
        lost_each = {
            "balanced accuracy": (balanced(before, truth) - balanced(after, truth), LOSES_BALANCED),
            "AUROC": (area(before, truth, positive) - area(after, truth, positive), LOSES_AUROC),
        }
        for name, (lost, most) in lost_each.items():
            told[f"lost_{name.replace(' ', '_').lower()}"] = lost
            if lost > most:
                reasons.append(f"{name} on {len(rest)} rendered cells fell by {lost:.4f}")
    if reasons:
        return Quantised(None, told, "; ".join(reasons))
    return Quantised(small, told)


def _quantise(graph: bytes, images: Images) -> bytes:
    onnxruntime()
    import onnx
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"image": images[at : at + 32]} for at in range(0, len(images), 32)]

        def get_next(self) -> dict[str, Images] | None:
            return self.left.pop(0) if self.left else None

    with tempfile.TemporaryDirectory() as folder, _quietly():
        plain, ready, small = (Path(folder) / f"{name}.onnx" for name in ("plain", "ready", "small"))
        plain.write_bytes(graph)
        quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
        dense = [node.name for node in onnx.load(ready).graph.node if node.op_type == "Gemm"]
        quantize_static(
            str(ready),
            str(small),
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=["Conv", "Gemm"],
            nodes_to_exclude=dense[-1:],  # the head: few numbers, and every error there is an error of the answer
        )
        return small.read_bytes()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    logger = logging.getLogger()
    before = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)
