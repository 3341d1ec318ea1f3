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

from pipeline.core.errors import BadModel
from pipeline.core.registry import Component, choices

Shape = tuple[int, ...]
Norm = Literal["group", "batch"]


class Model(Component):
    takes: ClassVar[str]  # the inputs in words, for people: "images of 28 x 28 pixels, 1 or 3 channels"

    @classmethod
    @abstractmethod
    def fits(cls, shape: Shape) -> bool:
        """Whether inputs of this shape (without the batch) suit the network."""

    @abstractmethod
    def network(self, shape: Shape, classes: int) -> nn.Module:
        """float (B, *shape) in [0, 1] -> logits (B, classes); the classifier is the last layer with parameters."""

    def build(self, shape: Shape, classes: int) -> nn.Module:
        if classes < 2:
            raise BadModel(f"model {self.name!r}: {classes} class is nothing to tell apart; give data with 2 or more")
        if not self.fits(shape):
            fitting = ", ".join(_fitting(shape)) or "none: resize the images"
            raise BadModel(
                f"model {self.name!r} takes {self.takes}, but the data have shape {shape}; "
                f"models for that shape: {fitting} (`name` in the study's [model])"
            )
        return self.network(shape, classes)

    def make(self, shape: Shape, classes: int, seed: int) -> nn.Module:
        """The same seed gives the same weights; the global generators, CUDA's included, stay as they were."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.build(shape, classes)


def image(shape: Shape, smallest: int, largest: float = math.inf) -> bool:
    """Whether a shape is (1 or 3 channels, height, width) with both sides within the bounds."""
    return len(shape) == 3 and shape[0] in (1, 3) and all(smallest <= side <= largest for side in shape[1:])


def group_norm(channels: int) -> nn.GroupNorm:
    # 16 groups: with few, wide groups the background level of bright smears, which differs from channel to channel,
    # outweighs the cell, and training can stay at the commonest class for epochs
    return nn.GroupNorm(math.gcd(channels, 16), channels)


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    return group_norm(channels) if norm == "group" else nn.BatchNorm2d(channels)


def _fitting(shape: Shape) -> list[str]:
    return [name for name, cls in choices("models").items() if issubclass(cls, Model) and cls.fits(shape)]
