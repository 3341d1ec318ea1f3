"""What the gradient of one example says exactly about the activations inside a network: linear algebra, no search.

A dense layer's weight gradient is (error x input) and its bias gradient is the error: their quotient is the input.
A convolution's weight gradient is the sum over positions of (error x input patch). With fewer positions than filters
its row space is the space of the input's patches (rank analysis as in R-GAP, Zhu & Blaschko 2021). Patches overlap
and have to agree where they do, so few inputs qualify: with stride 1 one, with stride 2 the input and its shifts.
Of these the right one leads, through the network, to what is already known of the next layer.

Two examples, or noise, fill the row space, and nothing is found: the answer is then None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.parameters import Spec, Vec

GAP = 10.0  # between a singular value of the signal and one of rounding errors
EXACT = 1e-3  # of the energy may be missed by what counts as exact
TRIES = 4


@dataclass(frozen=True)
class Layer:
    module: nn.Conv2d | nn.Linear
    shape: tuple[int, ...]  # of its input, without the batch
    positions: int  # at which a convolution's filters are applied
    weight: Tensor  # gradients
    bias: Tensor | None


@dataclass(frozen=True)
class Known:
    """What a layer was fed; up to a positive factor if it is a convolution."""

    layer: Layer
    value: Tensor  # (*layer.shape)
    image: bool  # it is the network's own input


def recover(module: nn.Module, gradient: Vec, shape: Sequence[int]) -> Known | None:
    """The earliest activation that follows from the gradient of one example, if any does."""
    found, after = None, None
    chain = layers(module, gradient, shape)
    for place, layer in reversed(list(enumerate(chain))):
        value = _dense(layer) if isinstance(layer.module, nn.Linear) else _convolution(module, layer, after, shape)
        after = None if value is None else Known(layer, value, place == 0)
        found = after or found
    return found


def layers(module: nn.Module, gradient: Vec, shape: Sequence[int]) -> list[Layer]:
    """Dense layers and convolutions in the order in which they are used."""
    names = {child: name for name, child in module.named_modules()}
    spec = Spec.of(module)
    parts = dict(zip(spec.names, spec.split(gradient.cpu()), strict=True))
    order: list[Layer] = []

    def note(child: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = parts.get(f"{names[child]}.weight")
        if weight is not None and isinstance(child, nn.Conv2d | nn.Linear):
            bias = parts.get(f"{names[child]}.bias")
            order.append(Layer(child, tuple(inputs[0].shape[1:]), math.prod(output.shape[2:]), weight, bias))

    hooks = [c.register_forward_hook(note) for c in module.modules() if isinstance(c, nn.Conv2d | nn.Linear)]
    module.eval()
    with torch.no_grad():
        module(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return order


@contextmanager
def watching(layer: Layer) -> Iterator[Callable[[], Tensor]]:
    """Gives what the layer was last fed."""
    seen: list[Tensor] = []

    def note(child: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[:] = [inputs[0]]

    hook = layer.module.register_forward_pre_hook(note)
    try:
        yield lambda: seen[0]
    finally:
        hook.remove()


def _dense(layer: Layer) -> Tensor | None:
    error, weight = layer.bias, layer.weight.double()
    if error is None or not error.any():
        return None
    error = error.double()
    value = error @ weight / (error @ error)
    missed = (weight - error[:, None] * value).norm() / weight.norm()
    return value.float().view(layer.shape) if missed**2 < EXACT else None


def _convolution(module: nn.Module, layer: Layer, after: Known | None, shape: Sequence[int]) -> Tensor | None:
    space = _candidates(layer)
    if space is None:
        return None
    if len(space) == 1:
        return space[0] * space[0].sum().sign()  # what follows a ReLU, and an image, is not negative
    return None if after is None else _leading_to(module, layer, space, after, shape)


def _candidates(layer: Layer) -> Tensor | None:
    """(n, *shape), orthonormal: inputs all of whose patches lie in the row space of the weight gradient."""
    conv = layer.module
    assert isinstance(conv, nn.Conv2d)
    if conv.groups != 1 or isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return None
    _, sizes, rows = torch.linalg.svd(layer.weight.flatten(1).double(), full_matrices=False)
    most = min(layer.positions, len(sizes) - 1)
    if layer.positions >= len(sizes) or not sizes[0] > 0:
        return None
    gaps = sizes[:most] / sizes[1 : most + 1].clamp(min=1e-12 * float(sizes[0]))
    rank = int(gaps.argmax()) + 1
    if gaps[rank - 1] < GAP:
        return None
    how = {"kernel_size": conv.kernel_size, "dilation": conv.dilation, "padding": conv.padding, "stride": conv.stride}
    fold = nn.Fold(layer.shape[1:], **how)
    times = fold(nn.Unfold(**how)(torch.ones(1, *layer.shape, dtype=torch.float64)))[0]
    cover = times.sqrt().clamp(min=1)  # pixels that no patch holds stay 0
    # one patch is one row, all others 0: (positions * rank, pixels)
    alone = torch.zeros(layer.positions, rank, rows.shape[1], layer.positions, dtype=torch.float64)
    alone[range(layer.positions), :, :, range(layer.positions)] = rows[:rank]
    spread = torch.cat([(fold(one) / cover).flatten(1) for one in alone])
    share, ways = torch.linalg.eigh(spread @ spread.T)  # share 1: overlapping patches agree
    agree = ways[:, share > 1 - EXACT].T
    if not len(agree):
        return None
    inputs = (agree @ spread).view(-1, *layer.shape) / cover
    basis: Tensor = torch.linalg.qr(inputs.flatten(1).T).Q.T
    return basis.float().reshape(inputs.shape)


def _leading_to(module: nn.Module, layer: Layer, space: Tensor, goal: Known, shape: Sequence[int]) -> Tensor | None:
    """The candidate from which the network arrives at the next layer's known input."""
    blank = torch.zeros(1, *shape)
    flat, size = space.flatten(1), math.sqrt(math.prod(layer.shape))
    mix = torch.zeros(len(space))

    def candidate() -> Tensor:
        value: Tensor = F.normalize(mix @ flat, dim=0) * size
        return value.view(1, *layer.shape)

    hook = layer.module.register_forward_pre_hook(lambda child, inputs: (candidate(),))
    try:
        with watching(goal.layer) as seen:
            for nth in range(TRIES):
                mix = torch.randn(len(space), generator=torch.Generator().manual_seed(nth)).requires_grad_()
                search = torch.optim.LBFGS([mix], max_iter=200, line_search_fn="strong_wolfe")

                def miss(search: torch.optim.Optimizer = search) -> Tensor:
                    search.zero_grad()
                    module(blank)
                    loss = 1 - F.cosine_similarity(seen().flatten(), goal.value.flatten(), 0)
                    loss.backward()
                    return loss

                search.step(miss)
                if float(miss().detach()) < EXACT:
                    return candidate().detach()[0]
    finally:
        hook.remove()
        module.zero_grad()
    return None
