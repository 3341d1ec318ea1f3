"""Stacked gradients of a chain of dense layers, by hand: batched matmuls without a tape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StackedMlpGradients:
    """Flatten? Linear (ReLU Linear)*: the thesis MLP, the 2NN and the moons net."""

    num_layers: int

    @classmethod
    def from_module(cls, module: nn.Module) -> StackedMlpGradients | None:
        parts = list(module) if isinstance(module, nn.Sequential) else []
        if parts and isinstance(parts[0], nn.Flatten):
            parts = parts[1:]
        dense, between = parts[::2], parts[1::2]
        is_mlp = (
            len(parts) % 2 == 1
            and all(isinstance(m, nn.Linear) and m.bias is not None for m in dense)
            and all(isinstance(m, nn.ReLU) for m in between)
        )
        return cls(len(dense)) if is_mlp else None

    def __call__(self, params: list[Tensor], x: Tensor, y: Tensor, example_weights: Tensor) -> Tensor:
        """params [weight (S, out, in), bias (S, out), ...] -> loss (S,)."""
        with torch.no_grad():
            inputs = [x.flatten(2)]
            for layer in range(self.num_layers):
                weight, bias = params[2 * layer : 2 * layer + 2]
                out = torch.baddbmm(bias.unsqueeze(1), inputs[-1], weight.mT)
                inputs.append(out.relu_() if layer < self.num_layers - 1 else out)
            log_p = inputs.pop().log_softmax(-1)
            label_log_p = log_p.gather(2, y.unsqueeze(2))
            grad_output = (
                log_p.exp_()
                .scatter_add_(2, y.unsqueeze(2), -torch.ones_like(label_log_p))
                .mul_(example_weights.unsqueeze(2))
            )
            for layer in reversed(range(self.num_layers)):
                weight, bias = params[2 * layer : 2 * layer + 2]
                weight.grad = torch.bmm(grad_output.mT, inputs[layer], **_reuse_gradient(weight))
                bias.grad = grad_output.sum(1)
                if layer:
                    grad_output = torch.bmm(grad_output, weight).mul_(inputs[layer] > 0)
        return -(label_log_p.squeeze(2) * example_weights).sum(1)


def _reuse_gradient(p: Tensor) -> dict[str, Tensor]:
    """The gradient of the last step is memory to write the new one to."""
    return {} if p.grad is None else {"out": p.grad}
