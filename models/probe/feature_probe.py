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

from models.probe.feature_names import MEASURES, TRAITS

_SEED = 0x5EED
_EVEN = 0.01  # contrast below which nothing can be sharp


def parted(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(body, head) with head(body(x)) = module(x): the head is the last dense layer; a copy, the module stays whole.

    Of a network that does not end in one, the body is all of it.
    """
    whole = copy.deepcopy(module).eval()
    dense = [name for name, layer in whole.named_modules() if isinstance(layer, nn.Linear)]
    if not dense:
        return whole, nn.Identity()
    if dense[-1] == "":
        return nn.Identity(), whole
    above, _, own = dense[-1].rpartition(".")
    head = whole.get_submodule(dense[-1])
    setattr(whole.get_submodule(above), own, nn.Identity())
    return whole, head


def rejoins(module: nn.Module, body: nn.Module, head: nn.Module, x: Tensor) -> bool:
    with torch.inference_mode():
        return torch.allclose(head(body(x)), module.eval()(x), atol=1e-5)


def projection(features: int) -> Tensor:
    """(features, at most TRAITS): the features themselves, or random sums of them, the same on every machine."""
    if features <= TRAITS:
        return torch.eye(features)
    dice = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (features, TRAITS), generator=dice) * 2 - 1
    return signs.float() / math.sqrt(TRAITS)


def measures(x: Tensor) -> Tensor:
    """(N, C, H, W) in [0, 1] -> (N, len(MEASURES)), each near [0, 1]; see models/probe/feature_names.py for what they mean."""
    grey = x.mean(1)
    height, width = grey.shape[1:]
    brightness = grey.mean((1, 2))
    contrast = (grey - brightness[:, None, None]).square().mean((1, 2)).sqrt()
    inner = grey[:, 1:-1, 1:-1]
    curved = 4 * inner - grey[:, :-2, 1:-1] - grey[:, 2:, 1:-1] - grey[:, 1:-1, :-2] - grey[:, 1:-1, 2:]
    sharpness = curved.abs().mean((1, 2)) / (contrast + _EVEN)
    colour = (x.amax(1) - x.amin(1)).mean((1, 2))
    middle = grey[:, height // 4 : height - height // 4, width // 4 : width - width // 4].mean((1, 2))
    around = (brightness * 4 - middle) / 3  # the middle is a quarter of the image
    return torch.stack([brightness, contrast, sharpness, colour, (around - middle) + 0.5], 1)


def views(x: Tensor, turns: int) -> Iterator[Tensor]:
    """(N, C, H, W) as it is, or in all eight ways to lay a square picture down."""
    yield x
    for n in range(1, turns):
        turned = torch.rot90(x, n % 4, (2, 3))
        yield turned.flip(3) if n >= 4 else turned


class Eye(nn.Module):
    """(N, C, H, W) in [0, 1] -> logits (N, classes), traits (N, at most TRAITS), measures (N, len(MEASURES))."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body, self.head = parted(module)
        device = next(module.parameters()).device
        if not rejoins(module, self.body, self.head, torch.rand(2, *shape, device=device)):
            self.body, self.head = copy.deepcopy(module).eval(), nn.Identity()
        with torch.inference_mode():
            features = self.body(torch.zeros(1, *shape, device=device)).shape[1]
        self.project: Tensor
        self.register_buffer("project", projection(features).to(device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x)
        return self.head(features), features @ self.project, measures(x)

    def turned(self, x: Tensor, turns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Means over the views: a cell has no upright, so each of them is another look at it."""
        seen = [self(view) for view in views(x, turns)]
        logits, traits, _ = (torch.stack(part).mean(0) for part in zip(*seen, strict=True))
        return logits, traits, seen[0][2]


__all__ = ["MEASURES", "TRAITS", "Eye", "measures", "parted", "projection", "rejoins", "views"]
