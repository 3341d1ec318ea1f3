"""Tensors and a JSON header as safetensors bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor


def to_bytes(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    ready: dict[str, Tensor] = {}
    held: set[int] = set()
    for key, value in tensors.items():
        plain = value.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        whole = storage.nbytes() == plain.nbytes
        # safetensors takes no two tensors of one storage, and a slice would be saved with all that surrounds it
        ready[key] = plain if whole and storage.data_ptr() not in held else plain.clone()
        held.add(storage.data_ptr())
    return save(ready, metadata={"hemofed": json.dumps(header)})
