"""Properties of every registered network: input shapes, seeds, parameter roles, state round trips, learning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.networks.base import ModelConfig
from pipeline.core.errors import ModelError
from pipeline.core.parameters import ParameterSpec
from pipeline.core.registry import registered_components

# the smallest input of each network, and the size of its head's input
INPUTS = {
    "mlp": ((1, 28, 28), 128),
    "twonn": ((1, 28, 28), 200),
    "moons_net": ((2,), 4),
    "cnn28": ((1, 28, 28), 64),
    "cnn72": ((3, 48, 48), 128),
    "densenet": ((3, 32, 32), 1024),
    "resnet": ((3, 32, 32), 512),
    "efficientnet": ((3, 32, 32), 1280),
}
SMALL_OPTIONS = {"resnet": {"depth": 10}}
NETWORKS_WITH_NORM = ["cnn28", "cnn72", "densenet", "resnet", "efficientnet"]


def make_model_config(name: str, **fields: object) -> ModelConfig:
    config = registered_components("models")[name].model_validate({**SMALL_OPTIONS.get(name, {}), **fields})
    assert isinstance(config, ModelConfig)
    return config


def make_network(name: str, seed: int = 0, **fields: object) -> nn.Module:
    return make_model_config(name, **fields).init_network(INPUTS[name][0], 3, seed)


def has_layer(module: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(m, kind) for m in module.modules())


def test_every_registered_model_is_tested_here() -> None:
    assert set(registered_components("models")) == set(INPUTS)


@pytest.mark.parametrize("name", INPUTS)
def test_logits_shape_and_a_gradient_step_lowers_the_loss(name: str) -> None:
    module = make_network(name).eval()  # without dropout, so that both losses are of the same function
    torch.manual_seed(1)
    x, y = torch.rand(6, *INPUTS[name][0]), torch.tensor([0, 1, 2, 0, 1, 2])
    before = nn.functional.cross_entropy(module(x), y)
    before.backward()
    norm = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]).norm()
    with torch.no_grad():
        for p in module.parameters():
            assert p.grad is not None
            p.sub_(0.01 * p.grad / norm)
        assert module(x).shape == (6, 3)
        assert nn.functional.cross_entropy(module(x), y) < before


@pytest.mark.parametrize("name", INPUTS)
def test_head_role_is_the_classifier(name: str) -> None:
    spec = ParameterSpec.from_module(make_network(name))
    heads = [s for s, r in zip(spec.shapes, spec.roles, strict=True) if r == "head"]
    assert heads == [(3, INPUTS[name][1]), (3,)]
    assert ("norm" in spec.roles) == (name in NETWORKS_WITH_NORM)


@pytest.mark.parametrize("name", INPUTS)
def test_model_state_round_trip(name: str) -> None:
    one, other = make_network(name, 1), make_network(name, 2)
    spec = ParameterSpec.from_module(one)
    assert not torch.equal(spec.read_state(one).weights, spec.read_state(other).weights)
    spec.write_state(other, spec.read_state(one))
    x = torch.rand(2, *INPUTS[name][0])
    with torch.no_grad():
        assert torch.equal(one.eval()(x), other.eval()(x))


@pytest.mark.parametrize("name", INPUTS)
def test_init_network_is_seeded_and_keeps_the_global_generator(name: str) -> None:
    before = torch.get_rng_state()
    one, other = make_network(name, 7), make_network(name, 7)
    assert torch.equal(torch.get_rng_state(), before)
    spec = ParameterSpec.from_module(one)
    assert torch.equal(spec.read_state(one).weights, spec.read_state(other).weights)


@pytest.mark.parametrize("name", NETWORKS_WITH_NORM)
def test_group_norm_by_default_without_norm_stats(name: str) -> None:
    module = make_network(name)
    assert has_layer(module, nn.GroupNorm)
    assert not has_layer(module, nn.BatchNorm2d)
    assert ParameterSpec.from_module(module).num_norm_stats == 0


@pytest.mark.parametrize("name", NETWORKS_WITH_NORM)
def test_batch_norm_option(name: str) -> None:
    module = make_network(name, norm="batch")
    assert has_layer(module, nn.BatchNorm2d)
    assert not has_layer(module, nn.GroupNorm)
    spec, group_norm_spec = ParameterSpec.from_module(module), ParameterSpec.from_module(make_network(name))
    assert spec.num_norm_stats > 0
    assert spec.num_parameters == group_norm_spec.num_parameters  # both norms have a scale and a shift per channel


@pytest.mark.parametrize(
    ("name", "shape", "cure"),
    [
        ("moons_net", (3,), "mlp, twonn"),
        ("cnn28", (1, 64, 64), "cnn72"),
        ("cnn28", (4, 28, 28), "mlp, twonn"),
        ("cnn28", (28, 28), "mlp, twonn"),
        ("cnn72", (1, 28, 28), "cnn28"),
        ("densenet", (3, 28, 28), "cnn28"),
        ("resnet", (3, 31, 64), "mlp, twonn"),
        ("efficientnet", (2,), "moons_net"),
        ("mlp", (), "resize"),
    ],
)
def test_wrong_input_shape_lists_matching_models(name: str, shape: tuple[int, ...], cure: str) -> None:
    with pytest.raises(ModelError) as raised:
        make_model_config(name).build_network(shape, 3)
    text = str(raised.value)
    assert name in text
    assert str(shape) in text
    assert make_model_config(name).input_description in text
    assert cure in text


def test_one_class_is_refused() -> None:
    with pytest.raises(ModelError, match="2 or more"):
        make_model_config("mlp").build_network((4,), 1)
