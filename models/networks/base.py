"""The base class of networks: name, hyperparameters, accepted input shapes, and construction.

To add a network, subclass `ModelConfig` in a file of this package (or in an entry point `hemofed.models`): give `name` a
default, describe the inputs in `input_description` and `accepts_shape`, and return the module from `create_network`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from torch import nn

from pipeline.core.errors import ModelError
from pipeline.core.registry import Component, registered_components

InputShape = tuple[int, ...]
NormType = Literal["group", "batch"]


class ModelConfig(Component):
    """A network's name and hyperparameters, as in the study's [model]."""

    input_description: ClassVar[str]  # for messages, e.g. "images of 28 x 28 pixels with 1 or 3 channels"

    @classmethod
    @abstractmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        """Whether the network takes inputs of this shape (without the batch dimension)."""

    @abstractmethod
    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        """A module: float (B, *shape) in [0, 1] -> logits (B, classes); its last layer with parameters is the classifier."""

    def build_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        if num_classes < 2:
            raise ModelError(
                f"model {self.name!r}: the data have {num_classes} class; give data with 2 or more classes"
            )
        if not self.accepts_shape(shape):
            matching = ", ".join(_matching_models(shape)) or "none: resize the images"
            raise ModelError(
                f"model {self.name!r} takes {self.input_description}, but the data have shape {shape}; "
                f"models for that shape: {matching} (`name` in the study's [model])"
            )
        return self.create_network(shape, num_classes)

    def init_network(self, shape: InputShape, num_classes: int, seed: int) -> nn.Module:
        """The same seed gives the same weights; leaves the global generators, including CUDA's, unchanged."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.build_network(shape, num_classes)


def is_image_shape(shape: InputShape, min_side: int, max_side: float = math.inf) -> bool:
    """Whether the shape is (1 or 3 channels, height, width) with both sides within the bounds."""
    return len(shape) == 3 and shape[0] in (1, 3) and all(min_side <= side <= max_side for side in shape[1:])


def create_group_norm(num_channels: int) -> nn.GroupNorm:
    # 16 groups: in wider groups the background of bright smears, which differs between channels, outweighs the cell, and
    # training can stay at the most frequent class for epochs
    return nn.GroupNorm(math.gcd(num_channels, 16), num_channels)


def create_norm_layer(norm: NormType, num_channels: int) -> nn.Module:
    return create_group_norm(num_channels) if norm == "group" else nn.BatchNorm2d(num_channels)


def _matching_models(shape: InputShape) -> list[str]:
    return [
        name
        for name, cls in registered_components("models").items()
        if issubclass(cls, ModelConfig) and cls.accepts_shape(shape)
    ]
