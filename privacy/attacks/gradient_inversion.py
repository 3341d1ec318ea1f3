"""Gradient inversion: reconstructs an image from a site's update after one step on one image.

The attack first uses linear algebra (privacy/attacks/analytic_inversion.py): a dense first layer reveals the image
exactly; in a convolutional network the activations of an early layer follow exactly, and a search finds an image that
leads to them. If the algebra finds nothing (several images in one update, noise), a search finds an image whose gradient
has the same direction, with cosine distance and total variation (Geiping et al. 2020, arXiv 2003.14053, after Zhu et al.
2019, arXiv 1906.08935). The sign of the head's bias gradient reveals the label (iDLG, Zhao et al. 2020, arXiv
2001.02610).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import ModelError
from pipeline.core.parameters import ParameterSpec, ParamVector
from privacy.attacks.analytic_inversion import RecoveredActivation, record_layer_input, recover_activation

InversionRoute = Literal["dense", "activations", "gradient"]
MIN_VALUES_PER_PIXEL = 1 / 8  # recovered activations per pixel; with fewer the gradient search is better


@dataclass(frozen=True)
class InversionResult:
    image: Tensor  # (C, H, W) from 0 to 1
    route: InversionRoute
    loss: float  # remaining distance of the search; 0 after algebra alone


def gradient_from_update(weights_before: ParamVector, weights_after: ParamVector, lr: float) -> ParamVector:
    """The gradient of one SGD step."""
    return (weights_before - weights_after) / lr


def infer_label(module: nn.Module, gradient: ParamVector) -> int:
    """The class whose bias the step raised most: exact for one example, a guess for several or with noise."""
    spec = ParameterSpec.from_module(module)
    parts = spec.split_parameters(gradient)
    biases = [n for n, role in enumerate(spec.roles) if role == "head" and len(spec.shapes[n]) == 1]
    if not biases:
        raise ModelError("the classifier has no bias that reveals the label; give the label to the attack")
    return int(parts[biases[-1]].argmin())


def invert_gradient(
    module: nn.Module,
    gradient: ParamVector,
    label: int | None,
    shape: Sequence[int],
    steps: int = 1500,
    restarts: int = 1,
    *,
    initial_color: Tensor | float = 0.5,
    smoothing_weight: float = 0.1,
    lr: float = 0.05,
    seed: int = 0,
) -> InversionResult:
    """The image that best explains the gradient at the module's current weights.

    `initial_color`: a grey level, or the mean colour (C, 1, 1) of images that an attacker has. A network that
    normalizes its first layer hides the brightness of the image, which is then that of `initial_color`.
    """
    module.eval()
    recovered = recover_activation(module, gradient, shape)
    if recovered is not None and recovered.is_image and isinstance(recovered.layer.module, nn.Linear):
        return InversionResult(recovered.value.reshape(tuple(shape)).clamp(0, 1), "dense", 0.0)
    search = ImageSearch(
        shape=tuple(shape),
        steps=steps,
        restarts=restarts,
        initial_color=initial_color,
        smoothing_weight=smoothing_weight,
        lr=lr,
        seed=seed,
        keep_brightness=is_brightness_invariant(module, shape),
    )
    if recovered is not None and recovered.value.numel() >= MIN_VALUES_PER_PIXEL * math.prod(shape):
        return _by_activations(module, recovered, search)
    return _by_gradient(module, gradient, infer_label(module, gradient) if label is None else label, search)


@dataclass(frozen=True)
class ImageSearch:
    shape: tuple[int, ...]
    steps: int
    restarts: int
    initial_color: Tensor | float
    smoothing_weight: float
    lr: float
    seed: int
    keep_brightness: bool  # the network hides it, and smoothing would make the image dark

    def minimize(self, loss_function: Callable[[Tensor], Tensor], use_sign: bool) -> tuple[Tensor, float]:
        """The image with the smallest loss of all restarts, and the loss. `use_sign`: Adam gets only the gradient's signs."""
        results = [self._run_restart(loss_function, use_sign, restart) for restart in range(self.restarts)]
        return min(results, key=lambda pair: pair[1])

    def _run_restart(
        self, loss_function: Callable[[Tensor], Tensor], use_sign: bool, restart: int
    ) -> tuple[Tensor, float]:
        generator = torch.Generator().manual_seed(self.seed + restart)
        # the colour is a separate parameter: only borders reveal it, so single pixels would hardly change it
        color = torch.zeros(1, self.shape[0], *(1 for _ in self.shape[1:])) + self.initial_color
        brightness = color.mean()
        detail = 0.01 * torch.randn(1, *self.shape, generator=generator)
        parts = [detail.requires_grad_()] if use_sign else [color.requires_grad_(), detail.requires_grad_()]
        optimizer = torch.optim.Adam(parts, self.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        final_loss = math.inf
        for _ in range(self.steps):
            x = color + detail
            loss = loss_function(x)
            final_loss = float(loss.detach())
            gradients = torch.autograd.grad(loss + self.smoothing_weight * total_variation(x), parts)
            for part, part_gradient in zip(parts, gradients, strict=True):
                part.grad = part_gradient.sign() if use_sign else part_gradient
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                if self.keep_brightness:
                    factor = brightness / (color + detail).mean()
                    color.mul_(factor)
                    detail.mul_(factor)
                detail.copy_((color + detail).clamp_(0, 1) - color)
        return (color + detail).detach()[0], final_loss


def total_variation(x: Tensor) -> Tensor:
    """Total variation per pixel."""
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


def is_brightness_invariant(module: nn.Module, shape: Sequence[int]) -> bool:
    """Whether half the brightness gives the same logits, e.g. if a convolution without bias is normalized."""
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        bright_logits, dark_logits = module(x), module(x / 2)
    return bool((bright_logits - dark_logits).norm() < 0.01 * bright_logits.norm())


def _by_activations(module: nn.Module, recovered: RecoveredActivation, search: ImageSearch) -> InversionResult:
    target = recovered.value.flatten()
    with record_layer_input(recovered.layer) as layer_input:

        def loss_function(x: Tensor) -> Tensor:
            module(x)
            return 1 - F.cosine_similarity(layer_input().flatten(), target, 0)

        image, loss = search.minimize(loss_function, use_sign=False)
    return InversionResult(image, "activations", loss)


def _by_gradient(module: nn.Module, gradient: ParamVector, label: int, search: ImageSearch) -> InversionResult:
    params = [p for p in module.parameters() if p.requires_grad]
    y = torch.tensor([label])

    def loss_function(x: Tensor) -> Tensor:
        gradients = torch.autograd.grad(F.cross_entropy(module(x), y), params, create_graph=True)
        return 1 - F.cosine_similarity(torch.cat([s.flatten() for s in gradients]), gradient, 0)

    image, loss = search.minimize(loss_function, use_sign=True)
    return InversionResult(image, "gradient", loss)
