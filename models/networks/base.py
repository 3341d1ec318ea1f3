"""What a network is to a study: a name, hyper-parameters, the inputs it takes, and how to build it.

A new network is a subclass of `Model` in a file of this package (or an entry point `hemofed.models`):
give `name` a default, say in `takes` and `fits` which inputs suit it, and return the module from `network`.
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
    input_description: ClassVar[str]  # the inputs in words, for people: "images of 28 x 28 pixels, 1 or 3 channels"

    @classmethod
    @abstractmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        """Whether inputs of this shape (without the batch) suit the network."""

    @abstractmethod
    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        """float (B, *shape) in [0, 1] -> logits (B, classes); the classifier is the last layer with parameters."""

    def build_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        if num_classes < 2:
            raise ModelError(
                f"model {self.name!r}: {num_classes} class is nothing to tell apart; give data with 2 or more"
            )
        if not self.accepts_shape(shape):
            matching = ", ".join(_matching_models(shape)) or "none: resize the images"
            raise ModelError(
                f"model {self.name!r} takes {self.input_description}, but the data have shape {shape}; "
                f"models for that shape: {matching} (`name` in the study's [model])"
            )
        return self.create_network(shape, num_classes)

    def init_network(self, shape: InputShape, num_classes: int, seed: int) -> nn.Module:
        """The same seed gives the same weights; the global generators, CUDA's included, stay as they were."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.build_network(shape, num_classes)


def is_image_shape(shape: InputShape, min_side: int, max_side: float = math.inf) -> bool:
    """Whether a shape is (1 or 3 channels, height, width) with both sides within the bounds."""
    return len(shape) == 3 and shape[0] in (1, 3) and all(min_side <= side <= max_side for side in shape[1:])


def create_group_norm(num_channels: int) -> nn.GroupNorm:
    # 16 groups: with few, wide groups the background level of bright smears, which differs from channel to channel,
    # outweighs the cell, and training can stay at the commonest class for epochs
    return nn.GroupNorm(math.gcd(num_channels, 16), num_channels)


def create_norm_layer(norm: NormType, num_channels: int) -> nn.Module:
    return create_group_norm(num_channels) if norm == "group" else nn.BatchNorm2d(num_channels)


def _matching_models(shape: InputShape) -> list[str]:
    return [
        name
        for name, cls in registered_components("models").items()
        if issubclass(cls, ModelConfig) and cls.accepts_shape(shape)
    ]
