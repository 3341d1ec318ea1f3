"""Figure of gradient inversion: one image and its reconstructions from an unprotected, a DP and a summed update.

One step on one image is the worst case; real rounds take many steps on many images. The mean image is shown for
comparison, because it is known without an attack. For a protected update the attack is tried with weak and strong
smoothing, and the reconstruction most similar to the original is shown, which no attacker could choose.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.core.errors import DataError
from pipeline.core.parameters import ParamVector
from pipeline.reports.document.figure_style import apply_figure_style
from privacy.attacks.gradient_inversion import InversionResult, invert_gradient
from privacy.dpsgd.secure_rng import SecureRandom

SMOOTHING_WEIGHTS = (0.1, 1.0)


@dataclass(frozen=True)
class ImageReconstruction:
    title: str
    image: Tensor  # (C, H, W)
    similarity: ImageSimilarity
    route: str  # method of the reconstruction


@dataclass(frozen=True)
class InversionFigure:
    original: Tensor
    reconstructions: tuple[ImageReconstruction, ...]  # mean image, unprotected, DP, secure aggregation

    def to_png(self) -> bytes:
        titles = ["original", *(f"{f.title}\nSSIM {f.similarity.ssim:.2f}" for f in self.reconstructions)]
        return render_image_row([self.original, *(f.image for f in self.reconstructions)], titles)


def make_inversion_figure(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    mean_image: Tensor,
    max_grad_norm: float,
    noise_multiplier: float,
    steps: int = 1000,
    secure_random: SecureRandom | None = None,
) -> InversionFigure:
    """Attacks the first of x (S, C, H, W), y (S,), which hold one example of each site.

    `mean_image` (C, H, W): mean of images that an attacker may have. `noise_multiplier`: in units of `max_grad_norm`. The
    module has the weights before the step.
    """
    gradients = [compute_gradient(module, image, label) for image, label in zip(x.split(1), y.split(1), strict=True)]
    own_gradient = gradients[0]
    clipped_gradient = own_gradient * min(1.0, max_grad_norm / float(own_gradient.norm()))
    noised_gradient = clipped_gradient + noise_multiplier * max_grad_norm * (secure_random or SecureRandom()).normal(
        own_gradient.shape
    )
    mean_color = mean_image.mean((1, 2), keepdim=True)

    def attack(update: ParamVector, smoothing_weights: Sequence[float]) -> InversionResult:
        results = [
            invert_gradient(
                module, update, None, x.shape[1:], steps, initial_color=mean_color, smoothing_weight=smoothing_weight
            )
            for smoothing_weight in smoothing_weights
        ]
        return max(results, key=lambda result: image_similarity(x[0], result.image).ssim)

    results_by_title = {
        "unprotected": attack(own_gradient, SMOOTHING_WEIGHTS[:1]),
        f"clipped, noise multiplier {noise_multiplier:.2g}": attack(noised_gradient, SMOOTHING_WEIGHTS),
        f"sum of {len(gradients)} sites": attack(torch.stack(gradients).sum(0), SMOOTHING_WEIGHTS),
    }
    reconstructions = [ImageReconstruction("mean image", mean_image, image_similarity(x[0], mean_image), "none")]
    reconstructions += [
        ImageReconstruction(title, result.image, image_similarity(x[0], result.image), result.route)
        for title, result in results_by_title.items()
    ]
    return InversionFigure(x[0], tuple(reconstructions))


def compute_gradient(module: nn.Module, x: Tensor, y: Tensor) -> ParamVector:
    """The gradient of the mean loss, as (P,)."""
    module.eval()
    params = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(module(x), y), params)])


# Similarity of two images (SSIM of Wang et al. 2004, PSNR, correlation), and a PNG of images in a row.

SSIM_WINDOW_PX, SSIM_SIGMA_PX = 11, 1.5  # side and standard deviation of the Gaussian window
SSIM_CONSTANTS = (0.01**2, 0.03**2)  # of the paper, for values from 0 to 1

MAX_PSNR_DB = 100.0  # JSON has no infinity


@dataclass(frozen=True)
class ImageSimilarity:
    ssim: float  # 1: identical
    psnr: float  # dB, at most MAX_PSNR_DB
    correlation: float  # of pixels minus their channel's mean: ignores brightness and contrast


def image_similarity(original: Tensor, reconstruction: Tensor) -> ImageSimilarity:
    """Similarity of images (C, H, W) with values from 0 to 1."""
    if original.shape != reconstruction.shape or original.dim() != 3:
        raise DataError(
            f"images of shapes {tuple(original.shape)} and {tuple(reconstruction.shape)}: give two (C, H, W) of equal shape"
        )
    a, b = original.detach().double(), reconstruction.detach().double()
    mse = float(((a - b) ** 2).mean())
    return ImageSimilarity(_ssim(a, b), min(MAX_PSNR_DB, -10 * math.log10(max(mse, 1e-300))), _correlation(a, b))


def render_image_row(images: Sequence[Tensor], titles: Sequence[str]) -> bytes:
    """PNG of images (C, H, W) in a row."""
    with apply_figure_style():
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
    """Mean over channels and over positions where the window is inside the image."""
    side = min(SSIM_WINDOW_PX, *a.shape[1:])
    gaussian = torch.exp(-((torch.arange(side, dtype=torch.float64) - (side - 1) / 2) ** 2) / (2 * SSIM_SIGMA_PX**2))
    window = (gaussian[:, None] * gaussian / gaussian.sum() ** 2)[None, None]

    def mean(x: Tensor) -> Tensor:
        return F.conv2d(x[:, None], window)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b, covariance = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2, mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + SSIM_CONSTANTS[0]) / (mean_a**2 + mean_b**2 + SSIM_CONSTANTS[0])
    structure = (2 * covariance + SSIM_CONSTANTS[1]) / (var_a + var_b + SSIM_CONSTANTS[1])
    return float((luminance * structure).mean())


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = (x - x.mean((1, 2), keepdim=True) for x in (a, b))
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-12))
