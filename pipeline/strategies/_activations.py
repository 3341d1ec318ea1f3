"""Networks seen through what they answer to public examples."""

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
    """[model][layer] (n, p), and the inputs (n, d)."""
    results = [
        s
        for s in requests.run_on_coordinator([ActivationsJob(m.weights, m.norm_stats, num_examples) for m in models])
        if isinstance(s, ActivationsResult)
    ]
    return [s.layers for s in results], results[0].inputs


def layer_parameter_indices(spec: ParameterSpec) -> list[list[int]]:
    """Places of the parameters of each layer with weights; a normalisation belongs to the layer before it."""
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
            f"{strategy_name} finds {len(observed_layers)} layers at work but {len(model_layers)} in the model, so it cannot swap layer by layer; "
            "set strategy.layerwise = false"
        )
