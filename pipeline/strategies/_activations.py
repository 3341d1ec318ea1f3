"""Networks seen through what they answer to public examples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeline.core.errors import BadModel
from pipeline.core.parameters import Snapshot, Spec
from pipeline.protocol.tasks import Activate, Activations
from pipeline.strategies.base import Ask


def activations(models: Sequence[Snapshot], ask: Ask, count: int) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """[model][layer] (n, p), and the inputs (n, d)."""
    seen = [s for s in ask.here([Activate(m.weights, m.stats, count) for m in models]) if isinstance(s, Activations)]
    return [s.layers for s in seen], seen[0].inputs


def layers_of(spec: Spec) -> list[list[int]]:
    """Places of the parameters of each layer with weights; a normalisation belongs to the layer before it."""
    layers: list[list[int]] = []
    last = ""
    for place, (name, role) in enumerate(zip(spec.names, spec.roles, strict=True)):
        owner = name.rpartition(".")[0]
        if not layers or (role != "norm" and owner != last):
            layers.append([])
            last = owner
        layers[-1].append(place)
    return layers


def same_layers(layers: Sequence[object], seen: Sequence[object], name: str) -> None:
    if len(layers) != len(seen):
        raise BadModel(
            f"{name} finds {len(seen)} layers at work but {len(layers)} in the model, so it cannot swap layer by layer; "
            "set strategy.layers = false"
        )
