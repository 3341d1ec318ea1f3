"""Checkpoints: one safetensors file per round with a JSON header, written atomically.

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

CHECKPOINT_FORMAT = 3
NUM_KEPT_CHECKPOINTS = 2  # the second as a fallback if the disk did not really sync the newest
_TENSOR_KEY, _TUPLE_KEY = "$tensor", "$tuple"


def save_checkpoint(folder: Path, round_number: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / f"round-{round_number:06d}.safetensors", {"format": CHECKPOINT_FORMAT, **header}, tensors)
    for old_path in sorted(folder.glob("round-*.safetensors"))[:-NUM_KEPT_CHECKPOINTS]:
        old_path.unlink()


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The newest checkpoint that can be read."""
    paths = sorted(folder.glob("round-*.safetensors"), reverse=True)
    for path in paths[:-1]:
        with contextlib.suppress(RunFolderError):
            return _load_file(path)
    if not paths:
        raise RunFolderError(f"{folder.parent} has no checkpoint to resume from; start again with `hemofed run`")
    return _load_file(paths[-1])


def _load_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header, tensors = load_tensors(path)
    if (file_format := header.pop("format", 1)) != CHECKPOINT_FORMAT:
        raise RunFolderError(
            f"{path} has checkpoint format {file_format}, but this version of hemofed reads format {CHECKPOINT_FORMAT}; "
            "resume with the version that wrote it, or start the run again"
        )
    return header, tensors


def shallow_fields(value: Any) -> dict[str, Any]:
    """A dataclass's fields, not converted recursively."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def serialize_state(value: Any, key_path: str, tensors: dict[str, Tensor]) -> Any:
    """The state as JSON; moves its tensors to `tensors`, keyed by their path."""
    if isinstance(value, Tensor):
        tensors[key_path] = value
        return {_TENSOR_KEY: key_path}
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            raise StrategyContractError(
                f"{key_path}: a dict in a state needs strings as keys; a checkpoint would turn other keys into strings"
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
