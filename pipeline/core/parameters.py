"""A module's parameters as one flat float32 vector, and back.

Trainable parameters form the vector `weights` (P,), BatchNorm's running statistics the vector `stats` (Q,)
(Q = 0 without BatchNorm). Statistics are averaged, never pulled, quantised, noised or server-stepped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pipeline.core.errors import BadModel

Vec = Tensor
Role = Literal["body", "head", "norm"]
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


@dataclass(frozen=True)
class Snapshot:
    """A model as it can be saved, sent or exported."""

    weights: Vec
    stats: Vec


@dataclass(frozen=True)
class Spec:
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    roles: tuple[Role, ...]
    stat_names: tuple[str, ...] = ()
    stat_shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Spec:
        """Head is the last layer that is not a normalisation; MONAI's and our networks end in their classifier."""
        owners = {
            f"{prefix}.{name}".lstrip("."): child
            for prefix, child in module.named_modules()
            for name, _ in child.named_parameters(recurse=False)
        }
        params = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        heads = [owners[name] for name, _ in params if not isinstance(owners[name], _NORMS)]
        head = heads[-1] if heads else None

        def role(name: str) -> Role:
            owner = owners[name]
            return "norm" if isinstance(owner, _NORMS) else "head" if owner is head else "body"

        stats = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        return cls(
            tuple(n for n, _ in params),
            tuple(tuple(p.shape) for _, p in params),
            tuple(role(n) for n, _ in params),
            tuple(n for n, _ in stats),
            tuple(tuple(b.shape) for _, b in stats),
        )

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def stat_size(self) -> int:
        return sum(math.prod(s) for s in self.stat_shapes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(s) for s in self.shapes)

    def mask(self, roles: Collection[Role]) -> Tensor:
        """(P,) bool: where parameters of these roles lie."""
        return torch.cat([torch.full((n,), r in roles) for n, r in zip(self.sizes, self.roles, strict=True)])

    def split(self, flat: Tensor) -> list[Tensor]:
        """(..., P) -> views of shape (..., *shape), one a parameter, in order."""
        return _split(flat, self.shapes, self.size, "weights")

    def split_stats(self, flat: Tensor) -> list[Tensor]:
        return _split(flat, self.stat_shapes, self.stat_size, "statistics")

    def read(self, module: nn.Module) -> Snapshot:
        return Snapshot(_join(p for p in module.parameters() if p.requires_grad), _join(self._stats(module)))

    def write(self, module: nn.Module, snapshot: Snapshot) -> None:
        with torch.no_grad():
            params = [p for p in module.parameters() if p.requires_grad]
            for p, value in zip(params, self.split(snapshot.weights), strict=True):
                p.copy_(value)
            for b, value in zip(self._stats(module), self.split_stats(snapshot.stats), strict=True):
                b.copy_(value)

    def _stats(self, module: nn.Module) -> list[Tensor]:
        buffers = dict(module.named_buffers())
        return [buffers[n] for n in self.stat_names]


def _join(tensors: Iterator[Tensor] | Iterator[nn.Parameter] | list[Tensor]) -> Tensor:
    flat = [t.detach().reshape(-1).float() for t in tensors]
    return torch.cat(flat) if flat else torch.zeros(0)


def _split(flat: Tensor, shapes: tuple[tuple[int, ...], ...], size: int, what: str) -> list[Tensor]:
    if flat.shape[-1] != size:
        raise BadModel(
            f"the {what} hold {flat.shape[-1]} numbers but the model has {size}; is it the same model section?"
        )
    parts = flat.split([math.prod(s) for s in shapes], dim=-1)
    return [p.reshape(*flat.shape[:-1], *s) for p, s in zip(parts, shapes, strict=True)]
