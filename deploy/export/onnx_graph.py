"""A trained network -> an ONNX graph that takes pictures as cameras give them, and a proof that both agree."""

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

from deploy.inference.onnx_session import session
from models.probe.feature_probe import Eye
from pipeline.core.errors import BadModel, BadRun
from pipeline.protocol.tasks import Lens

OPSET = 20
PARITY = 1e-4
LUMA = (0.299, 0.587, 0.114)  # as Pillow makes grey of colours
FLATTEST = 1 / 255  # as sites/population/color_normalization.py


class Bedside(nn.Module):
    """uint8 (N, H, W, 3) -> probabilities (N, C), whitened traits (N, D), measures (N, Q)."""

    def __init__(
        self, module: nn.Module, shape: tuple[int, ...], lens: Lens | None, normalise: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.eye = Eye(module, shape)
        self.grey = shape[0] == 1
        self.normalise = dict(normalise)
        self.temperature = lens.temperature if lens else 1.0
        width = int(self.eye.project.shape[1])
        if lens and len(lens.mean) != width:
            raise BadRun(
                f"the run's profile has {len(lens.mean)} traits and its network {width}: it is another version's; run the study anew"
            )
        self.mean: Tensor
        self.whiten: Tensor
        self.luma: Tensor
        self.register_buffer("mean", lens.mean.float() if lens else torch.zeros(width))
        self.register_buffer("whiten", lens.whiten.float() if lens else torch.eye(width))
        self.register_buffer("luma", torch.tensor(LUMA).view(1, 3, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, traits, measured = self.eye(self.prepared(image))
        return (logits / self.temperature).softmax(1), (traits - self.mean) @ self.whiten, measured

    def prepared(self, image: Tensor) -> Tensor:
        x: Tensor = image.permute(0, 3, 1, 2).float()
        if self.grey:
            x = (x * self.luma).sum(1, keepdim=True)
        if self.normalise["name"] == "image":
            x = x / 255
            mean = x.mean((2, 3), keepdim=True)
            std = (x - mean).square().mean((2, 3), keepdim=True).sqrt().clamp(min=FLATTEST)
            # not rounded to grey levels as at sites: two runtimes would round the same number to different ones
            spread, level = float(self.normalise["std"]), float(self.normalise["mean"])
            return ((x - mean) / std * spread + level).clamp(0, 1)
        return x / 255


def to_onnx(bedside: Bedside, size: tuple[int, int]) -> bytes:
    """Static but for the batch."""
    out = io.BytesIO()
    sample = torch.zeros((2, *size, 3), dtype=torch.uint8)
    try:
        program = _exported(bedside, sample)
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise BadModel(
            f"the network cannot be written as ONNX ({reason}); use another model, or another operation in yours"
        ) from error
    program.save(out)
    return out.getvalue()


def _exported(bedside: Bedside, sample: Tensor) -> Any:
    with _quietly():
        return torch.onnx.export(
            bedside.eval(),
            (sample,),
            input_names=["image"],
            output_names=["probabilities", "traits", "measures"],
            dynamic_shapes=({0: torch.export.Dim("n", min=1, max=1 << 16)},),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )


def answers(graph: bytes, images: NDArray[np.uint8]) -> tuple[NDArray[np.float32], ...]:
    found: tuple[NDArray[np.float32], ...] = tuple(session(graph).run(None, {"image": images}))
    return found


def parity(bedside: Bedside, module: nn.Module, graph: bytes, images: NDArray[np.uint8]) -> float:
    """The largest difference of a probability between the network as it was trained and the graph.

    The network in double: torch's own single-precision convolutions are off by up to 1e-4, a hundred times the graph's error.
    """
    exact = copy.deepcopy(module).eval().double()
    with torch.inference_mode():
        x = bedside.prepared(torch.from_numpy(images)).double()
        theirs = (exact(x) / bedside.temperature).softmax(1).numpy()
    return float(np.abs(theirs - answers(graph, images)[0]).max())


def check_parity(bedside: Bedside, module: nn.Module, graph: bytes, images: NDArray[np.uint8]) -> float:
    found = parity(bedside, module, graph, images)
    if not found <= PARITY:
        raise BadModel(
            f"the exported graph differs from the network by up to {found:.2g} in a probability (at most {PARITY:g} on "
            f"{len(images)} images): nothing was exported; does the model use an operation that ONNX has not?"
        )
    return found


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporter prints and warns about its own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
