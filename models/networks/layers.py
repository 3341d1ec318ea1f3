"""Layers and checks that several networks share."""

from __future__ import annotations

import math
from typing import Literal

from torch import nn

InputShape = tuple[int, ...]
NormType = Literal["group", "batch"]


def is_image_shape(shape: InputShape, min_side: int, max_side: float = math.inf) -> bool:
    """Whether the shape is (1 or 3 channels, height, width) with both sides within the bounds."""
    return len(shape) == 3 and shape[0] in (1, 3) and all(min_side <= side <= max_side for side in shape[1:])


def create_group_norm(num_channels: int) -> nn.GroupNorm:
    # 16 groups: in wider groups the background of bright smears, which differs between channels, outweighs the cell, and
    # training can stay at the most frequent class for epochs
    return nn.GroupNorm(math.gcd(num_channels, 16), num_channels)


def create_norm_layer(norm: NormType, num_channels: int) -> nn.Module:
    return create_group_norm(num_channels) if norm == "group" else nn.BatchNorm2d(num_channels)
