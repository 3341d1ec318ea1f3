"""The image behind a gradient: what a coordinator can make of a site's update after one step on one image.

First by algebra (privacy/attacks/analytic_inversion.py): a dense first layer gives the image away as it is; in a convolutional
network the activations of an early layer follow exactly, and an image is sought that leads to them. Where the algebra
finds nothing (several images in one update, noise), an image is sought whose own gradient points the same way: cosine
distance and total variation (Geiping et al. 2020, arXiv 2003.14053, after Zhu et al. 2019, arXiv 1906.08935). The
label shows in the sign of the head's bias gradient (iDLG, Zhao et al. 2020, arXiv 2001.02610).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import BadModel
from pipeline.core.parameters import Spec, Vec
from privacy.attacks.analytic_inversion import Known, recover, watching

Route = Literal["dense", "activations", "gradient"]
ENOUGH = 1 / 8  # numbers known a pixel; with fewer the gradient says more


@dataclass(frozen=True)
class Inverted:
    image: Tensor  # (C, H, W) from 0 to 1
    route: Route
    miss: float  # what is left of the distance that was made small; 0 after algebra alone


def gradient_of(before: Vec, after: Vec, lr: float) -> Vec:
    """The gradient behind one step of plain descent."""
    return (before - after) / lr


def label_of(module: nn.Module, gradient: Vec) -> int:
    """The class whose bias the step raised most. Sure for one example, a guess for a sum of several or with noise."""
    spec = Spec.of(module)
    parts = spec.split(gradient)
    biases = [n for n, role in enumerate(spec.roles) if role == "head" and len(spec.shapes[n]) == 1]
    if not biases:
        raise BadModel("the classifier has no bias that could tell the label; give the label to the attack")
    return int(parts[biases[-1]].argmin())


def invert(
    module: nn.Module,
    gradient: Vec,
    label: int | None,
    shape: Sequence[int],
    steps: int = 1500,
    restarts: int = 1,
    *,
    start: Tensor | float = 0.5,
    smooth: float = 0.1,
    lr: float = 0.05,
    seed: int = 0,
) -> Inverted:
    """The image that best explains the gradient at the module's present weights.

    `start`: a grey, or the mean colour (C, 1, 1) of images that an attacker has. A network that normalises its first
    layer hides how bright an image is, which is then taken from here.
    """
    module.eval()
    known = recover(module, gradient, shape)
    if known is not None and known.image and isinstance(known.layer.module, nn.Linear):
        return Inverted(known.value.reshape(tuple(shape)).clamp(0, 1), "dense", 0.0)
    search = Search(tuple(shape), steps, restarts, start, smooth, lr, seed, blind_to_light(module, shape))
    if known is not None and known.value.numel() >= ENOUGH * math.prod(shape):
        return _by_activations(module, known, search)
    return _by_gradient(module, gradient, label_of(module, gradient) if label is None else label, search)


@dataclass(frozen=True)
class Search:
    shape: tuple[int, ...]
    steps: int
    restarts: int
    start: Tensor | float
    smooth: float
    lr: float
    seed: int
    blind: bool  # brightness is kept, because the network cannot tell it and smoothness would have it dark

    def least(self, miss: Callable[[Tensor], Tensor], sign: bool) -> tuple[Tensor, float]:
        """Of all restarts the image with the least miss, and that. `sign`: Adam sees only the gradient's signs."""
        found = [self._once(miss, sign, nth) for nth in range(self.restarts)]
        return min(found, key=lambda pair: pair[1])

    def _once(self, miss: Callable[[Tensor], Tensor], sign: bool, nth: int) -> tuple[Tensor, float]:
        dice = torch.Generator().manual_seed(self.seed + nth)
        # the colour by itself: only an image's borders tell it, and it would hardly move as that of single pixels
        colour = torch.zeros(1, self.shape[0], *(1 for _ in self.shape[1:])) + self.start
        light = colour.mean()
        detail = 0.01 * torch.randn(1, *self.shape, generator=dice)
        parts = [detail.requires_grad_()] if sign else [colour.requires_grad_(), detail.requires_grad_()]
        adam = torch.optim.Adam(parts, self.lr)
        slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, self.steps)
        left = math.inf
        for _ in range(self.steps):
            x = colour + detail
            missed = miss(x)
            left = float(missed.detach())
            slopes = torch.autograd.grad(missed + self.smooth * variation(x), parts)
            for part, slope in zip(parts, slopes, strict=True):
                part.grad = slope.sign() if sign else slope
            adam.step()
            slower.step()
            with torch.no_grad():
                if self.blind:
                    factor = light / (colour + detail).mean()
                    colour.mul_(factor)
                    detail.mul_(factor)
                detail.copy_((colour + detail).clamp_(0, 1) - colour)
        return (colour + detail).detach()[0], left


def variation(x: Tensor) -> Tensor:
    """Total variation, by pixel."""
    return (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


def blind_to_light(module: nn.Module, shape: Sequence[int]) -> bool:
    """Whether half the light makes no difference, as where a convolution without bias is normalised."""
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        bright, dark = module(x), module(x / 2)
    return bool((bright - dark).norm() < 0.01 * bright.norm())


def _by_activations(module: nn.Module, known: Known, search: Search) -> Inverted:
    goal = known.value.flatten()
    with watching(known.layer) as seen:

        def miss(x: Tensor) -> Tensor:
            module(x)
            return 1 - F.cosine_similarity(seen().flatten(), goal, 0)

        image, left = search.least(miss, sign=False)
    return Inverted(image, "activations", left)


def _by_gradient(module: nn.Module, gradient: Vec, label: int, search: Search) -> Inverted:
    params = [p for p in module.parameters() if p.requires_grad]
    y = torch.tensor([label])

    def miss(x: Tensor) -> Tensor:
        slopes = torch.autograd.grad(F.cross_entropy(module(x), y), params, create_graph=True)
        return 1 - F.cosine_similarity(torch.cat([s.flatten() for s in slopes]), gradient, 0)

    image, left = search.least(miss, sign=True)
    return Inverted(image, "gradient", left)
