"""Fully connected networks.

mlp        the MLP of the Fashion-MNIST thesis, 784-128-10 by default
twonn      the 2NN of McMahan et al. 2017, arXiv 1602.05629: 784-200-200-10
moons_net  2-4-2, for points in the plane

The modules are sequences Flatten, Linear, ReLU, ..., Linear, whose gradients the stacked trainer computes by hand
(sites/training/stacked_mlp.py).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import nn

from models.networks.base import ModelConfig
from models.networks.layers import InputShape

InitScheme = Literal["glorot", "torch"]


def dense_chain(widths: list[int], init: InitScheme) -> list[nn.Module]:
    """Linear layers between successive widths, with a ReLU after each except the last."""
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(widths):
        linear = nn.Linear(in_features, out_features)
        if init == "glorot":  # Keras's default, which the thesis used
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return layers[:-1]


class DenseNetwork(ModelConfig):
    """Base of `mlp` and `twonn`, which differ in the default hidden layers."""

    input_description: ClassVar[str] = "inputs of any shape"
    hidden: tuple[PositiveInt, ...]
    activation: Literal["relu"] = "relu"
    init: InitScheme = "glorot"

    @classmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        return len(shape) > 0 and all(side > 0 for side in shape)

    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *dense_chain([math.prod(shape), *self.hidden, num_classes], self.init))


class MLP(DenseNetwork):
    name: Literal["mlp"] = "mlp"
    hidden: tuple[PositiveInt, ...] = Field(default=(128,), description="widths of the hidden layers")


class TwoNN(DenseNetwork):
    name: Literal["twonn"] = "twonn"
    hidden: tuple[PositiveInt, ...] = Field(default=(200, 200), description="widths of the hidden layers")


class MoonsNet(ModelConfig):
    """The network of the two-moons report (4 hidden units). The report names no activation; this one uses ReLU."""

    name: Literal["moons_net"] = "moons_net"
    input_description: ClassVar[str] = "points with 2 coordinates, shape (2,)"
    init: InitScheme = "glorot"

    @classmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        return shape == (2,)

    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        return nn.Sequential(*dense_chain([2, 4, num_classes], self.init))
