"""Per-site feature skew: how a site's acquisition differs. Applied to train, val and test alike."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from pipeline.components import Component
from pipeline.errors import Refused


class Skew(Component):
    @abstractmethod
    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        """x of site number `site` (from 0) as that site sees it; None where nothing changes."""


class NoSkew(Skew):
    name: Literal["none"] = "none"

    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        return None


class Plane(Skew):
    """Points of the plane, moved and turned (x' = x cos - y sin, y' = x sin + y cos) at the first `sites` sites."""

    name: Literal["plane"] = "plane"
    sites: NonNegativeInt = 0
    dx: float = 0.0
    dy: float = 0.0
    theta: float = 0.0  # radians

    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        if x.dim() != 2 or x.shape[1] != 2:
            raise Refused(
                f"skew 'plane' moves points of the plane, not data of shape {tuple(x.shape[1:])}; use data 'moons'"
            )
        if site >= self.sites:
            return None
        cos, sin = math.cos(self.theta), math.sin(self.theta)
        turned = x @ torch.tensor([[cos, sin], [-sin, cos]], dtype=x.dtype)
        return turned + torch.tensor([self.dx, self.dy], dtype=x.dtype)
