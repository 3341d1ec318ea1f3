"""Dense networks: `mlp` of the Fashion-MNIST thesis (784-128-10) and `twonn`, the lecture's 2NN (784-200-200-10).

The module is a chain Flatten, Linear, ReLU, ..., Linear, which the stacked trainer runs for all sites at once.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import nn

from models.networks.base import InputShape, ModelConfig

InitScheme = Literal["glorot", "torch"]


def dense_chain(widths: list[int], init: InitScheme) -> list[nn.Module]:
    """Linear layers between successive widths, ReLU after all but the last."""
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(widths):
        linear = nn.Linear(in_features, out_features)
        if init == "glorot":  # Keras's default, which the thesis used
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return layers[:-1]


class DenseNetwork(ModelConfig):
    """Base of the dense networks below, which only choose the hidden layers."""

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


# `moons_net`: the toy report's dense 4 -> dense 2 for points in the plane. The report names no activation: we use ReLU.


class MoonsNet(ModelConfig):
    name: Literal["moons_net"] = "moons_net"
    input_description: ClassVar[str] = "points with 2 coordinates, shape (2,)"
    init: InitScheme = "glorot"

    @classmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        return shape == (2,)

    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        return nn.Sequential(*dense_chain([2, 4, num_classes], self.init))
