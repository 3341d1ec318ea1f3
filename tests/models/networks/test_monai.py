"""Changes to the MONAI networks: GroupNorm instead of BatchNorm, support of hooks, lazy import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from models.networks.monai import DenseNet, EfficientNet, MonaiNet, ResNet, replace_batch_norm
from pipeline.core.errors import MissingExtraError


def test_replace_batch_norm_in_nested_layers() -> None:
    module = nn.Sequential(nn.BatchNorm2d(16), nn.Sequential(nn.Conv2d(16, 20, 1), nn.BatchNorm2d(20)))
    replace_batch_norm(module)
    norms = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert [(m.num_groups, m.num_channels) for m in norms] == [(16, 16), (4, 20)]


@pytest.mark.parametrize("net", [DenseNet(), ResNet(depth=10), ResNet(depth=50), EfficientNet()])
def test_backward_hooks_run_for_every_layer(net: MonaiNet) -> None:
    """Full backward hooks, which Opacus uses for per-sample gradients, fail on in-place operations."""
    module = net.init_network((3, 32, 32), 2, seed=0)
    layers = {m for m in module.modules() if list(m.parameters(recurse=False))}
    layers_with_gradient: set[nn.Module] = set()
    for layer in layers:
        layer.register_full_backward_hook(lambda m, *_: layers_with_gradient.add(m))
    # without requires_grad torch warns that the first layer has no input gradient
    module(torch.rand(2, 3, 32, 32, requires_grad=True)).sum().backward()
    assert layers_with_gradient == layers


def test_efficientnet_swish_is_not_memory_efficient() -> None:
    kinds = {type(m).__name__ for m in EfficientNet().build_network((3, 32, 32), 2).modules()}
    assert "Swish" in kinds
    assert "MemoryEfficientSwish" not in kinds


def test_unknown_depth_lists_the_choices() -> None:
    with pytest.raises(ValidationError, match="10, 18, 34 or 50"):
        ResNet.model_validate({"depth": 19})


def test_listing_the_models_does_not_import_monai() -> None:
    code = "import sys; from pipeline.core.registry import registered_components; registered_components('models'); sys.exit('monai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_monai_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "monai"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtraError, match=r"'resnet' needs MONAI; pip install 'hemofed\[train\]'"):
        ResNet().build_network((3, 32, 32), 2)
