"""Activations of networks on public examples, and the grouping of parameters by layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipeline.core.errors import ModelError
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.tasks import ActivationsJob, ActivationsResult
from pipeline.strategies.base import ClientRequests


def compute_activations(
    models: Sequence[ModelState], requests: ClientRequests, num_examples: int
) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """Activations [model][layer] of shape (n, p), and the inputs (n, d). n is at most `num_examples`."""
    jobs = [ActivationsJob(m.weights, m.norm_stats, num_examples) for m in models]
    results = [r for r in requests.run_on_coordinator(jobs) if isinstance(r, ActivationsResult)]
    return [r.layers for r in results], results[0].inputs


def layer_parameter_indices(spec: ParameterSpec) -> list[list[int]]:
    """Parameter indices of each layer with weights; a normalization layer belongs to the layer before it."""
    layers: list[list[int]] = []
    current_layer = ""
    for index, (name, role) in enumerate(zip(spec.names, spec.roles, strict=True)):
        owner = name.rpartition(".")[0]
        if not layers or (role != "norm" and owner != current_layer):
            layers.append([])
            current_layer = owner
        layers[-1].append(index)
    return layers


def check_same_layers(model_layers: Sequence[object], observed_layers: Sequence[object], strategy_name: str) -> None:
    if len(model_layers) != len(observed_layers):
        raise ModelError(
            f"{strategy_name} finds activations of {len(observed_layers)} layers, but the model has parameters in {len(model_layers)}, "
            "so it cannot swap layer by layer; set strategy.layerwise = false"
        )
