"""`moons_net`: the toy report's dense 4 -> dense 2 on points of the plane. Its activation is not said: ReLU is ours."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from models.base import Model, Shape
from models.mlp import Init, dense_chain


class MoonsNet(Model):
    name: Literal["moons_net"] = "moons_net"
    takes: ClassVar[str] = "points with 2 coordinates, shape (2,)"
    init: Init = "glorot"

    @classmethod
    def fits(cls, shape: Shape) -> bool:
        return shape == (2,)

    def network(self, shape: Shape, classes: int) -> nn.Module:
        return nn.Sequential(*dense_chain([2, 4, classes], self.init))
