"""Gradient inversion shown: one image, and what is found of it in an update as it is, with DP, and in a secure sum.

One step on one image is the worst case: real turns take many steps on many images. The mean image stands beside the
finds, for whoever knows what cells look like has that without any attack. Where an update is protected, the attack is
tried with little and with much smoothing and the find that is most like the original is shown, which no attacker knows.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import BadData
from pipeline.core.parameters import Vec
from pipeline.reports.document.figure_style import styled
from privacy.attacks.gradient_inversion import Inverted, invert
from privacy.dpsgd.secure_rng import Entropy

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


# How alike two images are (SSIM of Wang et al. 2004, PSNR, correlation), and a picture that shows them side by side.

WINDOW, WIDTH = 11, 1.5  # of the Gaussian window, in pixels: its side and its standard deviation
SMALL = (0.01**2, 0.03**2)  # the constants of the paper, for values from 0 to 1

SAME = 100.0  # dB: JSON has no infinity


@dataclass(frozen=True)
class Likeness:
    ssim: float  # 1: the same
    psnr: float  # dB, at most SAME
    correlation: float  # of the pixels after each channel's mean is taken away: blind to brightness and contrast


def likeness(true: Tensor, found: Tensor) -> Likeness:
    """Of images (C, H, W) with values from 0 to 1."""
    if true.shape != found.shape or true.dim() != 3:
        raise BadData(f"images of shapes {tuple(true.shape)} and {tuple(found.shape)}: give both as (C, H, W), alike")
    a, b = true.detach().double(), found.detach().double()
    error = float(((a - b) ** 2).mean())
    return Likeness(_ssim(a, b), min(SAME, -10 * math.log10(max(error, 1e-300))), _correlation(a, b))


def panel(images: Sequence[Tensor], titles: Sequence[str]) -> bytes:
    """PNG of images (C, H, W) in a row."""
    with styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2.2 * len(images), 2.75), layout="constrained")
        for axes, image, title in zip(figure.subplots(1, len(images), squeeze=False)[0], images, titles, strict=True):
            pixels = image.detach().cpu().clamp(0, 1)
            axes.imshow(pixels.expand(3, *pixels.shape[1:]).permute(1, 2, 0).numpy(), interpolation="nearest")
            axes.set_title(title, fontsize=9)
            axes.set_axis_off()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _ssim(a: Tensor, b: Tensor) -> float:
    """Mean over the places at which the window lies inside, and over channels."""
    side = min(WINDOW, *a.shape[1:])
    ramp = torch.exp(-((torch.arange(side, dtype=torch.float64) - (side - 1) / 2) ** 2) / (2 * WIDTH**2))
    window = (ramp[:, None] * ramp / ramp.sum() ** 2)[None, None]

    def mean(x: Tensor) -> Tensor:
        return F.conv2d(x[:, None], window)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b, both = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2, mean(a * b) - mean_a * mean_b
    light = (2 * mean_a * mean_b + SMALL[0]) / (mean_a**2 + mean_b**2 + SMALL[0])
    shape = (2 * both + SMALL[1]) / (var_a + var_b + SMALL[1])
    return float((light * shape).mean())


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = (x - x.mean((1, 2), keepdim=True) for x in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-12))
