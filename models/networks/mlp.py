"""Dense networks: `mlp` of the Fashion-MNIST thesis (784-128-10) and `twonn`, the lecture's 2NN (784-200-200-10).

The module is a plain chain Flatten, Linear, ReLU, ..., Linear, which the stacked trainer runs for all sites at once.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import nn

from models.networks.base import Model, Shape

Init = Literal["glorot", "torch"]


def dense_chain(widths: list[int], init: Init) -> list[nn.Module]:
    """Linear layers between successive widths, ReLU after all but the last."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        linear = nn.Linear(before, after)
        if init == "glorot":  # as Keras does, in which the thesis was written
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return layers[:-1]


class Dense(Model):
    """The code of all dense networks; the registered ones below only choose the hidden layers."""

    takes: ClassVar[str] = "inputs of any shape"
    hidden: tuple[PositiveInt, ...]
    activation: Literal["relu"] = "relu"
    init: Init = "glorot"

    @classmethod
    def fits(cls, shape: Shape) -> bool:
        return len(shape) > 0 and all(side > 0 for side in shape)

    def network(self, shape: Shape, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *dense_chain([math.prod(shape), *self.hidden, classes], self.init))


class MLP(Dense):
    name: Literal["mlp"] = "mlp"
    hidden: tuple[PositiveInt, ...] = Field(default=(128,), description="widths of the hidden layers")


class TwoNN(Dense):
    name: Literal["twonn"] = "twonn"
    hidden: tuple[PositiveInt, ...] = Field(default=(200, 200), description="widths of the hidden layers")


# `moons_net`: the toy report's dense 4 -> dense 2 on points of the plane. Its activation is not said: ReLU is ours.


class MoonsNet(Model):
    name: Literal["moons_net"] = "moons_net"
    takes: ClassVar[str] = "points with 2 coordinates, shape (2,)"
    init: Init = "glorot"

    @classmethod
    def fits(cls, shape: Shape) -> bool:
        return shape == (2,)

    def network(self, shape: Shape, classes: int) -> nn.Module:
        return nn.Sequential(*dense_chain([2, 4, classes], self.init))
