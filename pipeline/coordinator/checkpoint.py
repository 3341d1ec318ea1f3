"""Checkpoints: one safetensors file a round, JSON in its header, written under another name, synced, renamed.

A state may hold tensors, plain JSON values, and dicts (string keys), tuples and lists of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.core.errors import BadRun, BadStrategy
from pipeline.core.files import write_atomically
from pipeline.core.tensor_io import to_bytes

KEEP = 2  # the last one, and the one before it in case the disk lies about syncing
_TENSOR, _TUPLE = "$tensor", "$tuple"


def save_tensors(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    write_atomically(path, to_bytes(header, tensors))


def load_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["hemofed"])
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise BadRun(f"there is no {path}") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise BadRun(f"{path} cannot be read ({error}); it is damaged or not from hemofed") from error


def save_checkpoint(folder: Path, round: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / f"round-{round:06d}.safetensors", header, tensors)
    for old in sorted(folder.glob("round-*.safetensors"))[:-KEEP]:
        old.unlink()


def load_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The newest that can be read."""
    found = sorted(folder.glob("round-*.safetensors"), reverse=True)
    for path in found[:-1]:
        with contextlib.suppress(BadRun):
            return load_tensors(path)
    if not found:
        raise BadRun(f"{folder.parent} holds no checkpoint to resume from; start it anew with `hemofed run`")
    return load_tensors(found[-1])


def shallow(value: Any) -> dict[str, Any]:
    """A dataclass's own fields, as they are."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def freeze(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON, its tensors put aside under their path."""
    if isinstance(value, Tensor):
        tensors[at] = value
        return {_TENSOR: at}
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            raise BadStrategy(f"{at}: a dict in a state needs texts for keys; others would come back as texts")
        return {str(k): freeze(v, f"{at}/{k}", tensors) for k, v in value.items()}
    if isinstance(value, tuple | list):
        items = [freeze(v, f"{at}/{i}", tensors) for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadStrategy(f"{at}: a {type(value).__name__} cannot be checkpointed; use tensors and plain values")


def thaw(frozen: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(frozen, dict):
        if frozen.keys() == {_TENSOR}:
            return tensors[frozen[_TENSOR]]
        if frozen.keys() == {_TUPLE}:
            return tuple(thaw(v, tensors) for v in frozen[_TUPLE])
        return {k: thaw(v, tensors) for k, v in frozen.items()}
    return [thaw(v, tensors) for v in frozen] if isinstance(frozen, list) else frozen
