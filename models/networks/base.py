"""The base class of networks: name, hyperparameters, accepted input shapes, and construction.

To add a network, subclass `ModelConfig` in a file of this package (or in an entry point `hemofed.models`): give `name` a
default, describe the inputs in `input_description` and `accepts_shape`, and return the module from `create_network`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from models.networks.layers import InputShape
from pipeline.core.errors import ModelError
from pipeline.core.registry import Component, registered_components


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


def _matching_models(shape: InputShape) -> list[str]:
    return [
        name
        for name, cls in registered_components("models").items()
        if issubclass(cls, ModelConfig) and cls.accepts_shape(shape)
    ]
