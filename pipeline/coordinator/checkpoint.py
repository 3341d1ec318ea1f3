"""Checkpoints: one safetensors file a round, JSON in its header, written under another name, synced, renamed.

A state may hold tensors, plain JSON values, and dicts (string keys), tuples and lists of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.core.errors import RunFolderError, StrategyContractError
from pipeline.core.tensor_io import load_tensors, save_tensors

NUM_KEPT_CHECKPOINTS = 2  # the last one, and the one before it in case the disk lies about syncing
_TENSOR_KEY, _TUPLE_KEY = "$tensor", "$tuple"


def save_checkpoint(folder: Path, round_number: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / f"round-{round_number:06d}.safetensors", header, tensors)
    for old_path in sorted(folder.glob("round-*.safetensors"))[:-NUM_KEPT_CHECKPOINTS]:
        old_path.unlink()


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The newest that can be read."""
    paths = sorted(folder.glob("round-*.safetensors"), reverse=True)
    for path in paths[:-1]:
        with contextlib.suppress(RunFolderError):
            return load_tensors(path)
    if not paths:
        raise RunFolderError(f"{folder.parent} holds no checkpoint to resume from; start it anew with `hemofed run`")
    return load_tensors(paths[-1])


def shallow_fields(value: Any) -> dict[str, Any]:
    """A dataclass's own fields, as they are."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def serialize_state(value: Any, key_path: str, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON, its tensors put aside under their path."""
    if isinstance(value, Tensor):
        tensors[key_path] = value
        return {_TENSOR_KEY: key_path}
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            raise StrategyContractError(
                f"{key_path}: a dict in a state needs texts for keys; others would come back as texts"
            )
        return {str(k): serialize_state(v, f"{key_path}/{k}", tensors) for k, v in value.items()}
    if isinstance(value, tuple | list):
        items = [serialize_state(v, f"{key_path}/{i}", tensors) for i, v in enumerate(value)]
        return {_TUPLE_KEY: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StrategyContractError(
        f"{key_path}: a {type(value).__name__} cannot be checkpointed; use tensors and plain values"
    )


def deserialize_state(serialized: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(serialized, dict):
        if serialized.keys() == {_TENSOR_KEY}:
            return tensors[serialized[_TENSOR_KEY]]
        if serialized.keys() == {_TUPLE_KEY}:
            return tuple(deserialize_state(v, tensors) for v in serialized[_TUPLE_KEY])
        return {k: deserialize_state(v, tensors) for k, v in serialized.items()}
    return [deserialize_state(v, tensors) for v in serialized] if isinstance(serialized, list) else serialized
