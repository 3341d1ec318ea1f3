"""Measures an image's quality and its features in a network, for the out-of-distribution guard of edge machines.

The same functions profile the sites' validation images and run inside the exported graph, so their numbers agree.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.probe.feature_names import MAX_FEATURES

_PROJECTION_SEED = 0x5EED
_MIN_CONTRAST = 0.01  # below it, sharpness is damped


def split_head(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(body, head) of a copy, with head(body(x)) = module(x): the head is the last linear layer, or the identity."""
    module_copy = copy.deepcopy(module).eval()
    linear_names = [name for name, layer in module_copy.named_modules() if isinstance(layer, nn.Linear)]
    if not linear_names:
        return module_copy, nn.Identity()
    if linear_names[-1] == "":
        return nn.Identity(), module_copy
    parent_name, _, layer_name = linear_names[-1].rpartition(".")
    head = module_copy.get_submodule(linear_names[-1])
    setattr(module_copy.get_submodule(parent_name), layer_name, nn.Identity())
    return module_copy, head


def is_equivalent_split(module: nn.Module, body: nn.Module, head: nn.Module, x: Tensor) -> bool:
    with torch.inference_mode():
        return torch.allclose(head(body(x)), module.eval()(x), atol=1e-5)


def random_projection(num_features: int) -> Tensor:
    """(num_features, at most MAX_FEATURES): the identity, or a random sign projection that is the same everywhere."""
    if num_features <= MAX_FEATURES:
        return torch.eye(num_features)
    generator = torch.Generator().manual_seed(_PROJECTION_SEED)
    signs = torch.randint(0, 2, (num_features, MAX_FEATURES), generator=generator) * 2 - 1
    return signs.float() / math.sqrt(MAX_FEATURES)


def measure_image_quality(x: Tensor) -> Tensor:
    """(N, C, H, W) in [0, 1] -> (N, Q), each about [0, 1], in the order of QUALITY_MEASURES."""
    gray = x.mean(1)
    height, width = gray.shape[1:]
    brightness = gray.mean((1, 2))
    contrast = (gray - brightness[:, None, None]).square().mean((1, 2)).sqrt()
    inner = gray[:, 1:-1, 1:-1]
    laplacian = 4 * inner - gray[:, :-2, 1:-1] - gray[:, 2:, 1:-1] - gray[:, 1:-1, :-2] - gray[:, 1:-1, 2:]
    sharpness = laplacian.abs().mean((1, 2)) / (contrast + _MIN_CONTRAST)
    colorfulness = (x.amax(1) - x.amin(1)).mean((1, 2))
    center = gray[:, height // 4 : height - height // 4, width // 4 : width - width // 4].mean((1, 2))
    surround = (brightness * 4 - center) / 3  # the center is a quarter of the image
    return torch.stack([brightness, contrast, sharpness, colorfulness, (surround - center) + 0.5], 1)


def iter_orientations(x: Tensor, num_tta_views: int) -> Iterator[Tensor]:
    """(N, C, H, W) as it is, then rotated and mirrored, up to all eight orientations of a square image."""
    yield x
    for n in range(1, num_tta_views):
        rotated = torch.rot90(x, n % 4, (2, 3))
        yield rotated.flip(3) if n >= 4 else rotated


class FeatureProbe(nn.Module):
    """(N, C, H, W) in [0, 1] -> logits (N, classes), features (N, at most MAX_FEATURES), quality measures (N, Q)."""

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body, self.head = split_head(module)
        device = next(module.parameters()).device
        if not is_equivalent_split(module, self.body, self.head, torch.rand(2, *input_shape, device=device)):
            self.body, self.head = copy.deepcopy(module).eval(), nn.Identity()
        with torch.inference_mode():
            num_features = self.body(torch.zeros(1, *input_shape, device=device)).shape[1]
        self.project: Tensor
        self.register_buffer("project", random_projection(num_features).to(device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x)
        return self.head(features), features @ self.project, measure_image_quality(x)

    def forward_tta(self, x: Tensor, num_tta_views: int) -> tuple[Tensor, Tensor, Tensor]:
        """Means of logits and features over the views; quality measures of the original image."""
        outputs = [self(view) for view in iter_orientations(x, num_tta_views)]
        logits, features, _ = (torch.stack(part).mean(0) for part in zip(*outputs, strict=True))
        return logits, features, outputs[0][2]


__all__ = [
    "MAX_FEATURES",
    "FeatureProbe",
    "is_equivalent_split",
    "iter_orientations",
    "measure_image_quality",
    "random_projection",
    "split_head",
]
