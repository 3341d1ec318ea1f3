"""Gradients of S stacked MLPs by hand-written backpropagation: batched matrix products without autograd.

`StackedMlpGradients` takes and returns what `make_vmap_gradients` (stacked.py) does, twice as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StackedMlpGradients:
    """For `nn.Sequential` of Flatten? Linear (ReLU Linear)*, such as the thesis MLP, the 2NN and the moons MLP."""

    num_layers: int  # linear layers

    @classmethod
    def from_module(cls, module: nn.Module) -> StackedMlpGradients | None:
        """None if the module has other layers."""
        layers = list(module) if isinstance(module, nn.Sequential) else []
        if layers and isinstance(layers[0], nn.Flatten):
            layers = layers[1:]
        linear_layers, activations = layers[::2], layers[1::2]
        is_mlp = (
            len(layers) % 2 == 1
            and all(isinstance(m, nn.Linear) and m.bias is not None for m in linear_layers)
            and all(isinstance(m, nn.ReLU) for m in activations)
        )
        return cls(len(linear_layers)) if is_mlp else None

    def __call__(self, params: list[Tensor], x: Tensor, y: Tensor, example_weights: Tensor) -> Tensor:
        """The losses (S,); writes the gradients to `.grad` of the parameters.

        params: [weight (S, out, in), bias (S, out), ...]; x: (S, B, ...); y: (S, B); example_weights: (S, B).
        """
        with torch.no_grad():
            inputs = [x.flatten(2)]  # of each layer, (S, B, in)
            for layer in range(self.num_layers):
                weight, bias = params[2 * layer : 2 * layer + 2]
                out = torch.baddbmm(bias.unsqueeze(1), inputs[-1], weight.mT)
                inputs.append(out.relu_() if layer < self.num_layers - 1 else out)
            log_p = inputs.pop().log_softmax(-1)
            label_log_p = log_p.gather(2, y.unsqueeze(2))
            # cross-entropy with respect to the logits: softmax - one-hot label, (S, B, C)
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
    """Writes the new gradient to the memory of the previous step's."""
    return {} if p.grad is None else {"out": p.grad}
