"""Stacked gradients of a chain of dense layers, by hand: batched matmuls without a tape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Chain:
    """Flatten? Linear (ReLU Linear)*: the thesis MLP, the 2NN and the moons net."""

    layers: int

    @classmethod
    def of(cls, module: nn.Module) -> Chain | None:
        parts = list(module) if isinstance(module, nn.Sequential) else []
        if parts and isinstance(parts[0], nn.Flatten):
            parts = parts[1:]
        dense, between = parts[::2], parts[1::2]
        fits = (
            len(parts) % 2 == 1
            and all(isinstance(m, nn.Linear) and m.bias is not None for m in dense)
            and all(isinstance(m, nn.ReLU) for m in between)
        )
        return cls(len(dense)) if fits else None

    def __call__(self, params: list[Tensor], x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        """params [weight (S, out, in), bias (S, out), ...] -> loss (S,)."""
        with torch.no_grad():
            inputs = [x.flatten(2)]
            for layer in range(self.layers):
                weight, bias = params[2 * layer : 2 * layer + 2]
                out = torch.baddbmm(bias.unsqueeze(1), inputs[-1], weight.mT)
                inputs.append(out.relu_() if layer < self.layers - 1 else out)
            log_p = inputs.pop().log_softmax(-1)
            picked = log_p.gather(2, y.unsqueeze(2))
            back = log_p.exp_().scatter_add_(2, y.unsqueeze(2), -torch.ones_like(picked)).mul_(share.unsqueeze(2))
            for layer in reversed(range(self.layers)):
                weight, bias = params[2 * layer : 2 * layer + 2]
                weight.grad = torch.bmm(back.mT, inputs[layer], **_into(weight))
                bias.grad = back.sum(1)
                if layer:
                    back = torch.bmm(back, weight).mul_(inputs[layer] > 0)
        return -(picked.squeeze(2) * share).sum(1)


def _into(p: Tensor) -> dict[str, Tensor]:
    """The gradient of the last step is memory to write the new one to."""
    return {} if p.grad is None else {"out": p.grad}
