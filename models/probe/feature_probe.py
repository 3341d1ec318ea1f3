"""What a network is shown, in a few numbers, and what it makes of it: from these a bedside machine tells foreign images.

The same functions run where the sites' validation images are profiled and inside the exported graph, so both speak of
the same numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.probe.feature_names import MAX_FEATURES

_PROJECTION_SEED = 0x5EED
_MIN_CONTRAST = 0.01  # contrast below which nothing can be sharp


def split_head(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(body, head) with head(body(x)) = module(x): the head is the last dense layer; a copy, the module stays whole.

    Of a network that does not end in one, the body is all of it.
    """
    module_copy = copy.deepcopy(module).eval()
    dense_names = [name for name, layer in module_copy.named_modules() if isinstance(layer, nn.Linear)]
    if not dense_names:
        return module_copy, nn.Identity()
    if dense_names[-1] == "":
        return nn.Identity(), module_copy
    parent_name, _, layer_name = dense_names[-1].rpartition(".")
    head = module_copy.get_submodule(dense_names[-1])
    setattr(module_copy.get_submodule(parent_name), layer_name, nn.Identity())
    return module_copy, head


def is_equivalent_split(module: nn.Module, body: nn.Module, head: nn.Module, x: Tensor) -> bool:
    with torch.inference_mode():
        return torch.allclose(head(body(x)), module.eval()(x), atol=1e-5)


def random_projection(num_features: int) -> Tensor:
    """(features, at most TRAITS): the features themselves, or random sums of them, the same on every machine."""
    if num_features <= MAX_FEATURES:
        return torch.eye(num_features)
    generator = torch.Generator().manual_seed(_PROJECTION_SEED)
    signs = torch.randint(0, 2, (num_features, MAX_FEATURES), generator=generator) * 2 - 1
    return signs.float() / math.sqrt(MAX_FEATURES)


def measure_image_quality(x: Tensor) -> Tensor:
    """(N, C, H, W) in [0, 1] -> (N, len(MEASURES)), each near [0, 1]; see models/probe/feature_names.py for what they mean."""
    gray = x.mean(1)
    height, width = gray.shape[1:]
    brightness = gray.mean((1, 2))
    contrast = (gray - brightness[:, None, None]).square().mean((1, 2)).sqrt()
    inner = gray[:, 1:-1, 1:-1]
    laplacian = 4 * inner - gray[:, :-2, 1:-1] - gray[:, 2:, 1:-1] - gray[:, 1:-1, :-2] - gray[:, 1:-1, 2:]
    sharpness = laplacian.abs().mean((1, 2)) / (contrast + _MIN_CONTRAST)
    colorfulness = (x.amax(1) - x.amin(1)).mean((1, 2))
    center = gray[:, height // 4 : height - height // 4, width // 4 : width - width // 4].mean((1, 2))
    surround = (brightness * 4 - center) / 3  # the middle is a quarter of the image
    return torch.stack([brightness, contrast, sharpness, colorfulness, (surround - center) + 0.5], 1)


def iter_orientations(x: Tensor, num_tta_views: int) -> Iterator[Tensor]:
    """(N, C, H, W) as it is, or in all eight ways to lay a square picture down."""
    yield x
    for n in range(1, num_tta_views):
        rotated = torch.rot90(x, n % 4, (2, 3))
        yield rotated.flip(3) if n >= 4 else rotated


class FeatureProbe(nn.Module):
    """(N, C, H, W) in [0, 1] -> logits (N, classes), traits (N, at most TRAITS), measures (N, len(MEASURES))."""

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
        """Means over the views: a cell has no upright, so each of them is another look at it."""
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
