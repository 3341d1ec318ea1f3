"""Gradient inversion shown: one image, and what is found of it in an update as it is, with DP, and in a secure sum.

One step on one image is the worst case: real turns take many steps on many images. The mean image stands beside the
finds, for whoever knows what cells look like has that without any attack. Where an update is protected, the attack is
tried with little and with much smoothing and the find that is most like the original is shown, which no attacker knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.weights import Vec
from privacy.attacks.inversion import Inverted, invert
from privacy.attacks.likeness import Likeness, likeness, panel
from privacy.entropy import Entropy

SMOOTH = (0.1, 1.0)


@dataclass(frozen=True)
class Find:
    title: str
    image: Tensor  # (C, H, W)
    likeness: Likeness
    route: str  # how it was found


@dataclass(frozen=True)
class Exhibit:
    original: Tensor
    finds: tuple[Find, ...]  # the mean image, unprotected, DP, secure sum

    def png(self) -> bytes:
        titles = ["original", *(f"{f.title}\nSSIM {f.likeness.ssim:.2f}" for f in self.finds)]
        return panel([self.original, *(f.image for f in self.finds)], titles)


def exhibit(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    typical: Tensor,
    clip: float,
    noise: float,
    steps: int = 1000,
    entropy: Entropy | None = None,
) -> Exhibit:
    """x (S, C, H, W), y (S,): an example of each site; the first is attacked. `typical` (C, H, W): the mean of images
    that the attacker may have; `noise`: in clipping norms, as in training. The module's weights are the round's."""
    gradients = [gradient(module, image, label) for image, label in zip(x.split(1), y.split(1), strict=True)]
    mine = gradients[0]
    clipped = mine * min(1.0, clip / float(mine.norm()))
    noised = clipped + noise * clip * (entropy or Entropy()).normal(mine.shape)
    start = typical.mean((1, 2), keepdim=True)

    def attack(update: Vec, smooths: Sequence[float]) -> Inverted:
        found = [invert(module, update, None, x.shape[1:], steps, start=start, smooth=smooth) for smooth in smooths]
        return max(found, key=lambda one: likeness(x[0], one.image).ssim)

    finds = {
        "as it is": attack(mine, SMOOTH[:1]),
        f"clipped, noise {noise:.2g}": attack(noised, SMOOTH),
        f"sum of {len(gradients)} sites": attack(torch.stack(gradients).sum(0), SMOOTH),
    }
    shown = [Find("mean image", typical, likeness(x[0], typical), "none")]
    shown += [Find(title, one.image, likeness(x[0], one.image), one.route) for title, one in finds.items()]
    return Exhibit(x[0], tuple(shown))


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Vec:
    """Of the mean loss: what one step of plain descent tells, divided by its rate."""
    module.eval()
    params = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(module(x), y), params)])
