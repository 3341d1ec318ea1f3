"""Small convolutional networks: `cnn28` for images such as Fashion-MNIST, `cnn72` for single blood cells.

Already the first stage halves the image by its stride, because convolutions at full resolution dominate the time of a
small CNN on a CPU. GroupNorm is the default: it has no running statistics that sites would have to share.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from models.networks.base import ModelConfig
from models.networks.layers import InputShape, NormType, create_norm_layer, is_image_shape


def conv_stage(
    in_channels: int, out_channels: int, norm: NormType, *, kernel_size: int = 3, stride: int = 2
) -> list[nn.Module]:
    # without bias, because the following norm layer has one
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
    return [conv, create_norm_layer(norm, out_channels), nn.ReLU()]


class CNN28(ModelConfig):
    """106,170 parameters for 1 x 28 x 28 and 10 classes."""

    name: Literal["cnn28"] = "cnn28"
    input_description: ClassVar[str] = "images of 24 to 39 pixels a side with 1 or 3 channels"
    norm: NormType = "group"

    @classmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        return is_image_shape(shape, 24, 39)

    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        in_channels, *sides = shape
        height, width = (-(-side // 4) for side in sides)  # two strides of 2, each rounding up
        return nn.Sequential(
            *conv_stage(in_channels, 16, self.norm, kernel_size=5),
            *conv_stage(16, 32, self.norm),
            nn.Flatten(),
            nn.Linear(32 * height * width, 64),
            nn.ReLU(),
            nn.Linear(64, num_classes),
        )


class CNN72(ModelConfig):
    """247,837 parameters for 3 x 72 x 72 and 13 classes; with global pooling the number is independent of the size."""

    name: Literal["cnn72"] = "cnn72"
    input_description: ClassVar[str] = "images of 40 to 96 pixels a side with 1 or 3 channels"
    norm: NormType = "group"
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="fraction of pooled features dropped in training")

    @classmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        return is_image_shape(shape, 40, 96)

    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        return nn.Sequential(
            *conv_stage(shape[0], 16, self.norm, kernel_size=5),
            *conv_stage(16, 32, self.norm),
            *conv_stage(32, 64, self.norm),
            *conv_stage(64, 128, self.norm),
            *conv_stage(128, 128, self.norm, stride=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(128, num_classes),
        )
