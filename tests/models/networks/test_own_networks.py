"""Sizes and initial weights of hemofed's own networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.networks.cnn import CNN28, CNN72
from models.networks.mlp import MLP, MoonsNet, TwoNN
from pipeline.core.parameters import ParameterSpec


def layer_types(module: nn.Module) -> list[type[nn.Module]]:
    return [type(m) for m in module.children()]


@pytest.mark.parametrize(
    ("module", "size"),
    [
        (MLP().build_network((1, 28, 28), 10), 784 * 128 + 128 + 128 * 10 + 10),  # 101,770
        (MLP(hidden=()).build_network((1, 28, 28), 10), 7850),
        (TwoNN().build_network((1, 28, 28), 10), 199_210),
        (MoonsNet().build_network((2,), 2), 2 * 4 + 4 + 4 * 2 + 2),
        (CNN28().build_network((1, 28, 28), 10), 106_170),
        (CNN72().build_network((3, 72, 72), 13), 247_837),
    ],
)
def test_number_of_parameters(module: nn.Module, size: int) -> None:
    assert ParameterSpec.from_module(module).num_parameters == size


def test_mlps_are_sequences_of_linear_and_relu() -> None:
    one_hidden_layer = [nn.Linear, nn.ReLU, nn.Linear]
    assert layer_types(MLP().build_network((1, 28, 28), 10)) == [nn.Flatten, *one_hidden_layer]
    assert layer_types(TwoNN().build_network((1, 28, 28), 10)) == [nn.Flatten, *one_hidden_layer[:2], *one_hidden_layer]
    assert layer_types(MoonsNet().build_network((2,), 2)) == one_hidden_layer


def test_glorot_initialization() -> None:
    for layer in MLP().init_network((1, 28, 28), 10, seed=3).children():
        if isinstance(layer, nn.Linear):
            bound = math.sqrt(6 / (layer.in_features + layer.out_features))
            assert 0.98 * bound < layer.weight.abs().max() <= bound
            assert not layer.bias.any()


def test_torch_initialization() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = nn.Linear(5, 4)
    first = next(
        m for m in MLP(init="torch", hidden=(4,)).init_network((5,), 2, seed=3).children() if isinstance(m, nn.Linear)
    )
    assert torch.equal(first.weight, expected.weight)
    assert torch.equal(first.bias, expected.bias)


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 28, 28), (1, 39, 30)])
def test_cnn28_takes_sizes_around_28(shape: tuple[int, ...]) -> None:
    assert CNN28().build_network(shape, 5)(torch.rand(2, *shape)).shape == (2, 5)


@pytest.mark.parametrize("shape", [(1, 40, 40), (3, 96, 96), (3, 72, 55)])
def test_cnn72_takes_any_size_with_the_same_weights(shape: tuple[int, ...]) -> None:
    module = CNN72().build_network(shape, 5)
    assert module(torch.rand(2, *shape)).shape == (2, 5)
    assert (
        ParameterSpec.from_module(module).num_parameters
        == ParameterSpec.from_module(CNN72().build_network((shape[0], 72, 72), 5)).num_parameters
    )


def test_dropout_only_in_training() -> None:
    module = CNN72(dropout=0.5).init_network((1, 48, 48), 2, seed=0)
    x = torch.rand(1, 1, 48, 48)
    with torch.no_grad():
        assert not torch.equal(module.train()(x), module(x))
        assert torch.equal(module.eval()(x), module(x))
