"""Tensors with a JSON header as safetensors bytes and files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically


def is_finite(x: Tensor) -> bool:
    """Like torch.isfinite(x).all(), 30 times as fast: one pass, because aminmax propagates NaN."""
    return not x.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(x))


def tensors_to_bytes(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    contiguous: dict[str, Tensor] = {}
    storage_pointers: set[int] = set()
    for key, value in tensors.items():
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        owns_storage = storage.nbytes() == tensor.nbytes
        # safetensors refuses two tensors of one storage and would save a slice with its whole storage
        contiguous[key] = tensor if owns_storage and storage.data_ptr() not in storage_pointers else tensor.clone()
        storage_pointers.add(storage.data_ptr())
    return save(contiguous, metadata={"hemofed": json.dumps(header)})


def save_tensors(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    write_atomically(path, tensors_to_bytes(header, tensors))


def load_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["hemofed"])
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise RunFolderError(f"there is no {path}") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}); it is damaged or not from hemofed") from error
