"""Exports a trained network as an ONNX graph with preprocessing inside, and checks that both give equal probabilities."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deploy.inference.onnx_session import OUTPUT_NAMES, create_session, run_session
from models.probe.feature_probe import FeatureProbe
from pipeline.core.errors import ModelError, RunFolderError
from pipeline.protocol.tasks import FeatureWhitening
from sites.data.color_tables import MIN_STD

OPSET = 20
MAX_PARITY_DIFFERENCE = 1e-4
LUMA_WEIGHTS = (0.299, 0.587, 0.114)  # of R, G, B, as in Pillow


class ExportModule(nn.Module):
    """uint8 (N, H, W, 3) -> probabilities (N, C), whitened features (N, D), quality measures (N, Q)."""

    def __init__(
        self,
        module: nn.Module,
        input_shape: tuple[int, ...],
        whitening: FeatureWhitening | None,
        normalization: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.probe = FeatureProbe(module, input_shape)
        self.is_grayscale = input_shape[0] == 1
        self.normalization = dict(normalization)
        self.temperature = whitening.temperature if whitening else 1.0
        num_features = int(self.probe.project.shape[1])
        if whitening and len(whitening.mean) != num_features:
            raise RunFolderError(
                f"the run's profile has {len(whitening.mean)} features and its network {num_features}: another version of hemofed made it; run the study again"
            )
        self.mean: Tensor
        self.whiten: Tensor
        self.luma: Tensor
        self.register_buffer("mean", whitening.mean.float() if whitening else torch.zeros(num_features))
        self.register_buffer("whiten", whitening.whitening.float() if whitening else torch.eye(num_features))
        self.register_buffer("luma", torch.tensor(LUMA_WEIGHTS).view(1, 3, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, features, quality_measures = self.probe(self.preprocess(image))
        return (logits / self.temperature).softmax(1), (features - self.mean) @ self.whiten, quality_measures

    def preprocess(self, image: Tensor) -> Tensor:
        x: Tensor = image.permute(0, 3, 1, 2).float()
        if self.is_grayscale:
            x = (x * self.luma).sum(1, keepdim=True)
        if self.normalization["name"] == "image":
            x = x / 255
            mean = x.mean((2, 3), keepdim=True)
            std = (x - mean).square().mean((2, 3), keepdim=True).sqrt().clamp(min=MIN_STD)
            # not rounded to gray levels as at sites: torch and onnxruntime may round the same number differently
            target_std, target_mean = float(self.normalization["std"]), float(self.normalization["mean"])
            return ((x - mean) / std * target_std + target_mean).clamp(0, 1)
        return x / 255


def to_onnx(export_module: ExportModule, input_size: tuple[int, int]) -> bytes:
    """The graph as bytes; only the batch size is dynamic."""
    buffer = io.BytesIO()
    sample = torch.zeros((2, *input_size, 3), dtype=torch.uint8)
    try:
        program = _export_program(export_module, sample)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ModelError(
            f"the network cannot be exported to ONNX ({reason}); use another model, or replace the operation in yours"
        ) from error
    program.save(buffer)
    return buffer.getvalue()


def _export_program(export_module: ExportModule, sample: Tensor) -> Any:
    with _silence_exporter():
        return torch.onnx.export(
            export_module.eval(),
            (sample,),
            input_names=["image"],
            output_names=list(OUTPUT_NAMES),
            dynamic_shapes=({0: torch.export.Dim("n", min=1, max=1 << 16)},),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )


def run_graph(graph: bytes, images: NDArray[np.uint8]) -> tuple[NDArray[np.float32], ...]:
    return run_session(create_session(graph), images)


def max_probability_difference(
    export_module: ExportModule, module: nn.Module, graph: bytes, images: NDArray[np.uint8]
) -> float:
    """The largest difference of a probability between the trained network and the graph.

    Runs the network in double precision: torch's single-precision convolutions are off by up to 1e-4, a hundred times the
    graph's error.
    """
    double_module = copy.deepcopy(module).eval().double()
    with torch.inference_mode():
        x = export_module.preprocess(torch.from_numpy(images)).double()
        expected = (double_module(x) / export_module.temperature).softmax(1).numpy()
    return float(np.abs(expected - run_graph(graph, images)[0]).max())


def check_parity(export_module: ExportModule, module: nn.Module, graph: bytes, images: NDArray[np.uint8]) -> float:
    difference = max_probability_difference(export_module, module, graph, images)
    if not difference <= MAX_PARITY_DIFFERENCE:
        raise ModelError(
            f"the exported graph differs from the network by up to {difference:.2g} in a probability (limit {MAX_PARITY_DIFFERENCE:g}, on "
            f"{len(images)} images), so nothing was exported; check the model for operations that ONNX lacks"
        )
    return difference


@contextlib.contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppresses the exporter's output and warnings about its internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    previous_levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), Path(os.devnull).open("w") as devnull, contextlib.redirect_stdout(devnull):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, previous_levels, strict=True):
                logger.setLevel(level)
