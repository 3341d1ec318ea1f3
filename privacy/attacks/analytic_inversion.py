"""Analytic gradient inversion: exact activations of a network from the gradient of one example, by linear algebra.

A dense layer's weight gradient is (error x input) and its bias gradient is the error, so their quotient is the input.
A convolution's weight gradient is the sum over positions of (error x input patch). With fewer positions than filters
its row space is the space of the input's patches (rank analysis as in R-GAP, Zhu & Blaschko 2021). Patches must agree
where they overlap, so few inputs are consistent: one with stride 1, the input and its shifts with stride 2. The right
one leads, through the network, to the known input of the next layer.

The gradient of two examples, or noise, fills the row space; the result is then None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.parameters import ParameterSpec, ParamVector

MIN_SINGULAR_VALUE_RATIO = 10.0  # of the smallest singular value of the signal to the largest of rounding errors
EXACT_TOLERANCE = 1e-3  # share of the energy that an exact solution may miss
MAX_SEARCH_TRIES = 4


@dataclass(frozen=True)
class LayerGradient:
    module: nn.Conv2d | nn.Linear
    input_shape: tuple[int, ...]  # without the batch dimension
    num_positions: int  # output positions of a convolution
    weight_gradient: Tensor
    bias_gradient: Tensor | None


@dataclass(frozen=True)
class RecoveredActivation:
    """A layer's input; up to a positive factor for a convolution."""

    layer: LayerGradient
    value: Tensor  # (*layer.input_shape)
    is_image: bool  # whether it is the input of the network


def recover_activation(module: nn.Module, gradient: ParamVector, shape: Sequence[int]) -> RecoveredActivation | None:
    """The earliest activation that follows exactly from the gradient of one example, if any."""
    earliest, next_activation = None, None
    layer_list = layer_gradients(module, gradient, shape)
    for index, layer in reversed(list(enumerate(layer_list))):
        value = (
            _recover_dense_input(layer)
            if isinstance(layer.module, nn.Linear)
            else _recover_convolution_input(module, layer, next_activation, shape)
        )
        next_activation = None if value is None else RecoveredActivation(layer, value, index == 0)
        earliest = next_activation or earliest
    return earliest


def layer_gradients(module: nn.Module, gradient: ParamVector, shape: Sequence[int]) -> list[LayerGradient]:
    """Dense layers and convolutions in the order of the forward pass."""
    names = {child: name for name, child in module.named_modules()}
    spec = ParameterSpec.from_module(module)
    parts = dict(zip(spec.names, spec.split_parameters(gradient.cpu()), strict=True))
    order: list[LayerGradient] = []

    def record_layer(child: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight_gradient = parts.get(f"{names[child]}.weight")
        if weight_gradient is not None and isinstance(child, nn.Conv2d | nn.Linear):
            bias_gradient = parts.get(f"{names[child]}.bias")
            order.append(
                LayerGradient(
                    child, tuple(inputs[0].shape[1:]), math.prod(output.shape[2:]), weight_gradient, bias_gradient
                )
            )

    hooks = [c.register_forward_hook(record_layer) for c in module.modules() if isinstance(c, nn.Conv2d | nn.Linear)]
    module.eval()
    with torch.no_grad():
        module(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return order


@contextmanager
def record_layer_input(layer: LayerGradient) -> Iterator[Callable[[], Tensor]]:
    """Yields a function that returns the layer's latest input."""
    last_input: list[Tensor] = []

    def record_input(child: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        last_input[:] = [inputs[0]]

    hook = layer.module.register_forward_pre_hook(record_input)
    try:
        yield lambda: last_input[0]
    finally:
        hook.remove()


def _recover_dense_input(layer: LayerGradient) -> Tensor | None:
    error, weight_gradient = layer.bias_gradient, layer.weight_gradient.double()
    if error is None or not error.any():
        return None
    error = error.double()
    value = error @ weight_gradient / (error @ error)
    relative_error = (weight_gradient - error[:, None] * value).norm() / weight_gradient.norm()
    return value.float().view(layer.input_shape) if relative_error**2 < EXACT_TOLERANCE else None


def _recover_convolution_input(
    module: nn.Module, layer: LayerGradient, next_activation: RecoveredActivation | None, shape: Sequence[int]
) -> Tensor | None:
    candidates = _candidate_inputs(layer)
    if candidates is None:
        return None
    if len(candidates) == 1:
        return candidates[0] * candidates[0].sum().sign()  # images and outputs of a ReLU are not negative
    return None if next_activation is None else _search_candidate(module, layer, candidates, next_activation, shape)


def _candidate_inputs(layer: LayerGradient) -> Tensor | None:
    """(n, *input_shape), orthonormal: inputs whose patches are all in the row space of the weight gradient."""
    conv = layer.module
    assert isinstance(conv, nn.Conv2d)
    if conv.groups != 1 or isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return None
    _, singular_values, rows = torch.linalg.svd(layer.weight_gradient.flatten(1).double(), full_matrices=False)
    max_rank = min(layer.num_positions, len(singular_values) - 1)
    if layer.num_positions >= len(singular_values) or not singular_values[0] > 0:
        return None
    ratios = singular_values[:max_rank] / singular_values[1 : max_rank + 1].clamp(min=1e-12 * float(singular_values[0]))
    rank = int(ratios.argmax()) + 1
    if ratios[rank - 1] < MIN_SINGULAR_VALUE_RATIO:
        return None
    unfold_settings = {
        "kernel_size": conv.kernel_size,
        "dilation": conv.dilation,
        "padding": conv.padding,
        "stride": conv.stride,
    }
    fold = nn.Fold(layer.input_shape[1:], **unfold_settings)
    patch_counts = fold(nn.Unfold(**unfold_settings)(torch.ones(1, *layer.input_shape, dtype=torch.float64)))[0]
    patch_weights = patch_counts.sqrt().clamp(min=1)  # pixels outside all patches stay 0
    # one patch per row, all others 0: (positions * rank, pixels)
    single_patches = torch.zeros(layer.num_positions, rank, rows.shape[1], layer.num_positions, dtype=torch.float64)
    single_patches[range(layer.num_positions), :, :, range(layer.num_positions)] = rows[:rank]
    spread_patches = torch.cat([(fold(patch) / patch_weights).flatten(1) for patch in single_patches])
    eigenvalues, eigenvectors = torch.linalg.eigh(
        spread_patches @ spread_patches.T
    )  # eigenvalue 1: overlapping patches agree
    consistent = eigenvectors[:, eigenvalues > 1 - EXACT_TOLERANCE].T
    if not len(consistent):
        return None
    inputs = (consistent @ spread_patches).view(-1, *layer.input_shape) / patch_weights
    basis: Tensor = torch.linalg.qr(inputs.flatten(1).T).Q.T
    return basis.float().reshape(inputs.shape)


def _search_candidate(
    module: nn.Module, layer: LayerGradient, candidates: Tensor, target: RecoveredActivation, shape: Sequence[int]
) -> Tensor | None:
    """The candidate that leads to the known input of the next layer."""
    blank = torch.zeros(1, *shape)
    flat_candidates, target_norm = candidates.flatten(1), math.sqrt(math.prod(layer.input_shape))
    coefficients = torch.zeros(len(candidates))

    def current_input() -> Tensor:
        value: Tensor = F.normalize(coefficients @ flat_candidates, dim=0) * target_norm
        return value.view(1, *layer.input_shape)

    hook = layer.module.register_forward_pre_hook(lambda child, inputs: (current_input(),))
    try:
        with record_layer_input(target.layer) as layer_input:
            for seed in range(MAX_SEARCH_TRIES):
                coefficients = torch.randn(
                    len(candidates), generator=torch.Generator().manual_seed(seed)
                ).requires_grad_()
                optimizer = torch.optim.LBFGS([coefficients], max_iter=200, line_search_fn="strong_wolfe")

                def compute_loss(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    module(blank)
                    loss = 1 - F.cosine_similarity(layer_input().flatten(), target.value.flatten(), 0)
                    loss.backward()
                    return loss

                optimizer.step(compute_loss)
                if float(compute_loss().detach()) < EXACT_TOLERANCE:
                    return current_input().detach()[0]
    finally:
        hook.remove()
        module.zero_grad()
    return None
