"""MONAI's DenseNet, ResNet and EfficientNet for 2-D images, without pretrained weights.

All are built with BatchNorm and then converted, because MONAI's ResNet passes its `norm` to the stem only. In-place
activations and EfficientNet's memory-efficient swish are replaced by ordinary ones, which hooks on layers (Opacus),
torch.func and the ONNX exporter require.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from models.networks.base import ModelConfig
from models.networks.layers import InputShape, NormType, create_group_norm, is_image_shape
from pipeline.core.errors import MissingExtraError


def replace_batch_norm(module: nn.Module) -> None:
    """Replaces every BatchNorm inside a module by a GroupNorm with the same number of channels."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, create_group_norm(child.num_features))
        else:
            replace_batch_norm(child)


class TensorCopy(nn.Module):
    """The identity, with a new tensor as output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def insert_copy_before_shortcut(module: nn.Module) -> None:
    """Copies the last norm's output in MONAI's residual blocks, which add the shortcut in place: hooks forbid that."""
    for block in module.modules():
        last_norm = "bn3" if hasattr(block, "bn3") else "bn2"
        if hasattr(block, last_norm):
            setattr(block, last_norm, nn.Sequential(getattr(block, last_norm), TensorCopy()))


class MonaiNet(ModelConfig):
    """Base of the MONAI networks."""

    input_description: ClassVar[str] = "images of at least 32 pixels a side with 1 or 3 channels"
    norm: NormType = "group"

    @classmethod
    def accepts_shape(cls, shape: InputShape) -> bool:
        return is_image_shape(shape, 32)  # five halvings

    @abstractmethod
    def create_monai_network(self, monai_nets: Any, in_channels: int, num_classes: int) -> Any:
        """The network from `monai.networks.nets`, with BatchNorm."""

    def create_network(self, shape: InputShape, num_classes: int) -> nn.Module:
        module: nn.Module = self.create_monai_network(_import_monai_nets(self.name), shape[0], num_classes)
        if self.norm == "group":
            replace_batch_norm(module)
        for layer in module.modules():
            if isinstance(layer, nn.ReLU):
                layer.inplace = False
        return module


class DenseNet(MonaiNet):
    name: Literal["densenet"] = "densenet"
    depth: Literal[121, 169, 201, 264] = 121

    def create_monai_network(self, monai_nets: Any, in_channels: int, num_classes: int) -> Any:
        factory = getattr(monai_nets, f"DenseNet{self.depth}")
        return factory(spatial_dims=2, in_channels=in_channels, out_channels=num_classes, pretrained=False)


class ResNet(MonaiNet):
    name: Literal["resnet"] = "resnet"
    depth: Literal[10, 18, 34, 50] = 18

    def create_monai_network(self, monai_nets: Any, in_channels: int, num_classes: int) -> Any:
        factory = getattr(monai_nets, f"resnet{self.depth}")
        # stride 2 as in the paper; MONAI's default of 1 has four times the pixels in every feature map
        module = factory(
            spatial_dims=2, n_input_channels=in_channels, num_classes=num_classes, conv1_t_stride=2, pretrained=False
        )
        insert_copy_before_shortcut(module)
        return module


class EfficientNet(MonaiNet):
    name: Literal["efficientnet"] = "efficientnet"
    size: Literal["b0", "b1", "b2", "b3"] = "b0"

    def create_monai_network(self, monai_nets: Any, in_channels: int, num_classes: int) -> Any:
        module = monai_nets.EfficientNetBN(
            f"efficientnet-{self.size}",
            spatial_dims=2,
            in_channels=in_channels,
            num_classes=num_classes,
            pretrained=False,
        )
        module.set_swish(memory_efficient=False)
        return module


def _import_monai_nets(model_name: str) -> Any:
    try:
        return importlib.import_module("monai.networks.nets")
    except ModuleNotFoundError as error:
        if error.name != "monai":
            raise
        raise MissingExtraError(f"model {model_name!r} needs MONAI; pip install 'hemofed[train]'") from error
