"""Converts a module's parameters to one flat float32 vector and back.

Trainable parameters form the vector `weights` (P,), BatchNorm's running statistics the vector `norm_stats` (Q,)
(Q = 0 without BatchNorm). Statistics are averaged; they are not regularized, quantized, noised or stepped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipeline.core.errors import ModelError

ParamVector = Tensor
ParameterRole = Literal["body", "head", "norm"]
_NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class ModelState:
    """A model as it can be saved, sent or exported."""

    weights: ParamVector
    norm_stats: ParamVector


@dataclass(frozen=True)
class ParameterSpec:
    """Names, shapes and roles of a module's parameters, in the order of the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    roles: tuple[ParameterRole, ...]
    norm_stat_names: tuple[str, ...] = ()
    norm_stat_shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_module(cls, module: nn.Module) -> ParameterSpec:
        """The head is the last layer that is not a normalization layer."""
        owners = {
            f"{prefix}.{name}".lstrip("."): child
            for prefix, child in module.named_modules()
            for name, _ in child.named_parameters(recurse=False)
        }
        params = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        heads = [owners[name] for name, _ in params if not isinstance(owners[name], _NORM_LAYERS)]
        head = heads[-1] if heads else None

        def role(name: str) -> ParameterRole:
            owner = owners[name]
            return "norm" if isinstance(owner, _NORM_LAYERS) else "head" if owner is head else "body"

        norm_buffers = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        return cls(
            tuple(n for n, _ in params),
            tuple(tuple(p.shape) for _, p in params),
            tuple(role(n) for n, _ in params),
            tuple(n for n, _ in norm_buffers),
            tuple(tuple(b.shape) for _, b in norm_buffers),
        )

    @property
    def num_parameters(self) -> int:
        return sum(self.parameter_sizes)

    @property
    def num_norm_stats(self) -> int:
        return sum(math.prod(s) for s in self.norm_stat_shapes)

    @property
    def parameter_sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(s) for s in self.shapes)

    def role_mask(self, roles: Collection[ParameterRole]) -> Tensor:
        """(P,) bool: True at parameters of these roles."""
        return torch.cat([torch.full((n,), r in roles) for n, r in zip(self.parameter_sizes, self.roles, strict=True)])

    def split_parameters(self, flat: Tensor) -> list[Tensor]:
        """(..., P) -> views of shape (..., *shape), one per parameter, in order."""
        return _split_flat(flat, self.shapes, self.num_parameters, "weights")

    def split_norm_stats(self, flat: Tensor) -> list[Tensor]:
        return _split_flat(flat, self.norm_stat_shapes, self.num_norm_stats, "statistics")

    def read_state(self, module: nn.Module) -> ModelState:
        return ModelState(
            _concat_flat(p for p in module.parameters() if p.requires_grad), _concat_flat(self._stat_buffers(module))
        )

    def write_state(self, module: nn.Module, state: ModelState) -> None:
        with torch.no_grad():
            params = [p for p in module.parameters() if p.requires_grad]
            for p, value in zip(params, self.split_parameters(state.weights), strict=True):
                p.copy_(value)
            for b, value in zip(self._stat_buffers(module), self.split_norm_stats(state.norm_stats), strict=True):
                b.copy_(value)

    def _stat_buffers(self, module: nn.Module) -> list[Tensor]:
        buffers = dict(module.named_buffers())
        return [buffers[n] for n in self.norm_stat_names]


def _concat_flat(tensors: Iterator[Tensor] | Iterator[nn.Parameter] | list[Tensor]) -> Tensor:
    flat = [t.detach().reshape(-1).float() for t in tensors]
    return torch.cat(flat) if flat else torch.zeros(0)


def _split_flat(flat: Tensor, shapes: tuple[tuple[int, ...], ...], size: int, what: str) -> list[Tensor]:
    if flat.shape[-1] != size:
        raise ModelError(
            f"the {what} hold {flat.shape[-1]} numbers but the model has {size}; is the [model] section the same?"
        )
    parts = flat.split([math.prod(s) for s in shapes], dim=-1)
    return [p.reshape(*flat.shape[:-1], *s) for p, s in zip(parts, shapes, strict=True)]


NamedTensors = Mapping[str, Tensor]
