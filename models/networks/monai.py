"""MONAI's DenseNet, ResNet and EfficientNet for 2-D images, without pretrained weights.

All are built with BatchNorm and then changed, because MONAI's ResNet hands its `norm` to the stem only. In-place
activations become ordinary ones and EfficientNet's memory-saving swish the plain one: hooks on layers (Opacus),
torch.func and the ONNX exporter need that.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from models.networks.base import Model, Norm, Shape, group_norm, image
from pipeline.core.errors import MissingExtra


def group_for_batch_norm(module: nn.Module) -> None:
    """Replaces every BatchNorm below a module by a GroupNorm of as many channels."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, group_norm(child.num_features))
        else:
            group_for_batch_norm(child)


class Copy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def copy_before_shortcut(module: nn.Module) -> None:
    """MONAI's residual blocks add the shortcut in place to their last norm's output; a copy is what hooks allow."""
    for block in module.modules():
        last = "bn3" if hasattr(block, "bn3") else "bn2"
        if hasattr(block, last):
            setattr(block, last, nn.Sequential(getattr(block, last), Copy()))


class MonaiNet(Model):
    takes: ClassVar[str] = "images of at least 32 pixels a side with 1 or 3 channels"
    norm: Norm = "group"

    @classmethod
    def fits(cls, shape: Shape) -> bool:
        return image(shape, 32)  # five halvings

    @abstractmethod
    def monai(self, nets: Any, channels: int, classes: int) -> Any:
        """The network as `monai.networks.nets` makes it, with BatchNorm."""

    def network(self, shape: Shape, classes: int) -> nn.Module:
        module: nn.Module = self.monai(_nets(self.name), shape[0], classes)
        if self.norm == "group":
            group_for_batch_norm(module)
        for layer in module.modules():
            if isinstance(layer, nn.ReLU):
                layer.inplace = False
        return module


class DenseNet(MonaiNet):
    name: Literal["densenet"] = "densenet"
    depth: Literal[121, 169, 201, 264] = 121

    def monai(self, nets: Any, channels: int, classes: int) -> Any:
        family = getattr(nets, f"DenseNet{self.depth}")
        return family(spatial_dims=2, in_channels=channels, out_channels=classes, pretrained=False)


class ResNet(MonaiNet):
    name: Literal["resnet"] = "resnet"
    depth: Literal[10, 18, 34, 50] = 18

    def monai(self, nets: Any, channels: int, classes: int) -> Any:
        family = getattr(nets, f"resnet{self.depth}")
        # stride 2 as in the paper; MONAI's own default of 1 means four times the pixels in every map
        module = family(
            spatial_dims=2, n_input_channels=channels, num_classes=classes, conv1_t_stride=2, pretrained=False
        )
        copy_before_shortcut(module)
        return module


class EfficientNet(MonaiNet):
    name: Literal["efficientnet"] = "efficientnet"
    size: Literal["b0", "b1", "b2", "b3"] = "b0"

    def monai(self, nets: Any, channels: int, classes: int) -> Any:
        module = nets.EfficientNetBN(
            f"efficientnet-{self.size}", spatial_dims=2, in_channels=channels, num_classes=classes, pretrained=False
        )
        module.set_swish(memory_efficient=False)
        return module


def _nets(model: str) -> Any:
    try:
        return importlib.import_module("monai.networks.nets")
    except ModuleNotFoundError as missing:
        if missing.name != "monai":
            raise
        raise MissingExtra(f"model {model!r} needs MONAI; pip install 'hemofed[train]'") from missing
