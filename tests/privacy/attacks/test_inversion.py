"""Gradient inversion: exact by algebra, recognizable in a convolutional network, defeated by noise and sums."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from models.networks.cnn import CNN28, CNN72
from models.networks.mlp import MLP, TwoNN
from pipeline.core.errors import DataError, ModelError
from pipeline.core.parameters import ModelState, ParameterSpec
from pipeline.protocol.tasks import TrainJob, TrainResult
from privacy.attacks.analytic_inversion import layer_gradients, record_layer_input, recover_activation
from privacy.attacks.gradient_inversion import (
    gradient_from_update,
    infer_label,
    invert_gradient,
    is_brightness_invariant,
    total_variation,
)
from privacy.attacks.inversion_figure import (
    MAX_PSNR_DB,
    compute_gradient,
    image_similarity,
    make_inversion_figure,
    render_image_row,
)
from privacy.dpsgd.secure_rng import SecureRandom
from sites.data.pool import ExamplePool, SplitIndices
from sites.data.synthetic_smear import SyntheticSmear
from sites.training.base import TrainerContext, TrainingConfig, TrainRequest
from sites.training.sequential import SequentialTrainer

pytestmark = pytest.mark.usefixtures("one_torch_thread")
CLASSES = 12


@pytest.fixture(scope="module")
def cells():
    """(x, y): rendered blood cells of several types, 48 pixels a side; a strongly stained patient's first."""
    data = SyntheticSmear(cells=24, patients=4, size=48, task="types", test=0, val=0).load(None, 1)
    return data.x.flip(0).float() / 255, data.y.flip(0)


@pytest.fixture(scope="module")
def small(cells):
    return F.interpolate(cells[0], 28, mode="area"), cells[1]


def train_one_step(model, x, y, lr):
    """(module, gradient, shape) that a coordinator sees of a site with one step on its only image."""
    shape, build = tuple(x.shape[1:]), lambda: model.init_network(tuple(x.shape[1:]), CLASSES, 0)
    module, row = build(), torch.zeros(1, dtype=torch.int64)
    training_config = TrainingConfig(None, "sgd", 0.0, 0.0, lambda round_number: lr)
    context = TrainerContext(
        build,
        ParameterSpec.from_module(module),
        ExamplePool(x, y, x.device),
        {"a": SplitIndices(row, row, row)},
        training_config,
        CLASSES,
        0,
    )
    initial_weights = context.spec.read_state(module).weights.clone()
    result = SequentialTrainer(context).run([TrainRequest("a", 0, 0, TrainJob(initial_weights, steps=1))])[0]
    assert isinstance(result, TrainResult)
    return module, gradient_from_update(initial_weights, result.weights, lr), shape


@pytest.mark.parametrize("model", [MLP(), TwoNN(hidden=(32, 16))])
def test_dense_first_layer_reveals_the_image(cells, model):
    x, y = cells
    module, gradient, shape = train_one_step(model, x[:1], y[:1], 0.1)
    found = invert_gradient(module, gradient, None, shape)
    assert found.route == "dense"
    assert image_similarity(x[0], found.image).ssim > 0.95
    assert image_similarity(x[0], found.image).psnr > 30


@pytest.mark.parametrize("label", [0, 4, 11])
def test_bias_gradient_reveals_the_label(small, label):
    x, _ = small
    module, gradient, _ = train_one_step(CNN28(), x[:1], torch.tensor([label]), 0.1)
    assert infer_label(module, gradient) == label


def test_head_without_bias_does_not_reveal_the_label():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3, bias=False))
    with pytest.raises(ModelError, match="give the label"):
        infer_label(module, torch.ones(12))


@pytest.mark.parametrize(("side", "channels"), [(48, 32), (72, 64)])
def test_activations_follow_exactly_from_one_gradient(cells, side, channels):
    """48 pixels: the third convolution has 6 x 6 positions and 64 filters; at 72 (9 x 9) only the fourth has fewer."""
    x, y = cells
    x = F.interpolate(x[2:3], side, mode="bilinear")
    module, gradient, shape = train_one_step(CNN72(), x, y[2:3], 0.05)
    found = recover_activation(module, gradient, shape)
    assert found is not None
    assert found.layer.input_shape[0] == channels
    assert not found.is_image
    with record_layer_input(found.layer) as layer_input:
        module(x)
    assert F.cosine_similarity(layer_input().flatten(), found.value.flatten(), 0) > 0.9999
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


def test_dense_layer_of_a_small_network_reveals_its_input(small):
    x, y = small
    module, gradient, shape = train_one_step(CNN28(), x[:1], y[:1], 0.1)
    found = recover_activation(module, gradient, shape)
    assert found is not None
    with record_layer_input(found.layer) as layer_input:
        module(x[:1])
    assert torch.allclose(layer_input()[0], found.value, atol=1e-2)


def test_two_examples_or_noise_defeat_analytic_inversion(cells):
    x, y = cells
    module = CNN72().init_network((3, 48, 48), CLASSES, 0)
    for update in (
        compute_gradient(module, x[:2], y[:2]),
        F.normalize(compute_gradient(module, x[:1], y[:1]), dim=0)
        + 0.003 * torch.randn(ParameterSpec.from_module(module).num_parameters),
    ):
        assert recover_activation(module, update, (3, 48, 48)) is None


def test_layer_gradients_are_in_forward_order():
    class Backwards(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(8, 2)
            self.first = torch.nn.Conv2d(1, 2, 3, stride=2)

        def forward(self, x):
            return self.last(self.first(x).flatten(1))

    module = Backwards()
    found = layer_gradients(module, torch.arange(float(ParameterSpec.from_module(module).num_parameters)), (1, 5, 5))
    assert [layer.module for layer in found] == [module.first, module.last]
    assert [layer.num_positions for layer in found] == [4, 1]
    assert found[1].weight_gradient.flatten().tolist() == list(range(16))  # its own part of the gradient


def test_convolutional_network_reveals_a_recognizable_image(cells):
    """The mean cell is known without an attack."""
    x, y = cells
    module, gradient, shape = train_one_step(CNN72(), x[:1], y[:1], 0.05)
    found = invert_gradient(module, gradient, None, shape, steps=600)
    similarity, mean_similarity = image_similarity(x[0], found.image), image_similarity(x[0], x[1:].mean(0))
    assert found.route == "activations"
    assert similarity.ssim > 0.8
    assert similarity.correlation > 0.85
    assert similarity.ssim > mean_similarity.ssim + 0.1


def test_inversion_after_training(small):
    """With trained weights and normalization layers."""
    x, y = small
    module = CNN28().init_network((3, 28, 28), CLASSES, 0)
    optimizer = torch.optim.Adam(module.parameters(), 0.003)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    found = invert_gradient(module, compute_gradient(module, x[:1], y[:1]), None, (3, 28, 28), steps=900)
    assert image_similarity(x[0], found.image).correlation > 0.9


def test_inversion_by_gradient_matching():
    """Without biases and with a wide kernel only gradient matching works; it finds a simple image."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),
        torch.nn.Sigmoid(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 64, 4, bias=False),
    )
    x = torch.full((1, 1, 8, 8), 0.8)
    x[..., 2:6, 3:7] = 0.2
    y = torch.tensor([2])
    found = invert_gradient(
        module, compute_gradient(module, x, y), 2, (1, 8, 8), steps=300, restarts=2, smoothing_weight=0.01
    )
    assert found.route == "gradient"
    assert image_similarity(x[0], found.image).correlation > 0.8


def test_noise_and_sums_hide_the_image(small):
    x, y = small
    module = CNN28().init_network((3, 28, 28), CLASSES, 0)
    shown = make_inversion_figure(
        module, x[:8], y[:8], x[8:].mean(0), 1.0, 1.0, steps=250, secure_random=SecureRandom(bytes(32))
    )
    mean, unprotected, noised, summed = shown.reconstructions
    assert unprotected.route == "activations"
    assert noised.route == summed.route == "gradient"
    assert unprotected.similarity.correlation > 0.8
    assert max(noised.similarity.correlation, summed.similarity.correlation) < 0.5
    assert unprotected.similarity.ssim > max(mean.similarity.ssim, noised.similarity.ssim, summed.similarity.ssim) + 0.1
    assert Image.open(io.BytesIO(shown.to_png())).size[0] > 1000


def test_dp_update_of_the_figure_is_clipped_and_noised(small, monkeypatch):
    """The attacked DP update has the length that clipping and noise give it."""
    x, y = small
    module = CNN28().init_network((3, 28, 28), CLASSES, 0)
    updates = []

    def record_update(module, update, label, shape, steps, **options):
        updates.append(update)
        return invert_gradient(module, update, label, shape, 1, **options)

    monkeypatch.setattr("privacy.attacks.inversion_figure.invert_gradient", record_update)
    make_inversion_figure(module, x[:3], y[:3], x[8:].mean(0), 0.5, 2.0, secure_random=SecureRandom(bytes(32)))
    own_gradient = compute_gradient(module, x[:1], y[:1])
    noise = SecureRandom(bytes(32)).normal(own_gradient.shape)
    assert torch.allclose(updates[0], own_gradient)
    assert torch.allclose(updates[1], 0.5 * F.normalize(own_gradient, dim=0) + 0.5 * 2.0 * noise, atol=1e-5)
    assert torch.allclose(
        updates[-1], sum(compute_gradient(module, x[n : n + 1], y[n : n + 1]) for n in range(3)), atol=1e-4
    )


def test_brightness_invariant_networks(small):
    assert is_brightness_invariant(CNN28().init_network((3, 28, 28), CLASSES, 0), (3, 28, 28))
    assert not is_brightness_invariant(MLP().init_network((3, 28, 28), CLASSES, 0), (3, 28, 28))


def test_initial_brightness_is_kept_if_the_network_hides_it(small):
    x, y = small
    module = CNN28().init_network((3, 28, 28), CLASSES, 0)
    gradient = compute_gradient(module, x[:1], y[:1])
    for color in (0.3, 0.6):
        found = invert_gradient(module, gradient, None, (3, 28, 28), steps=60, initial_color=color)
        assert float(found.image.mean()) == pytest.approx(color, abs=0.03)


def test_total_variation_by_hand():
    assert float(total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]]))) == pytest.approx(0.5 + 0.5)


def test_ssim_of_one_window_by_hand():
    """11 x 11 pixels hold the window once: weighted means, variances and covariance as in the paper."""
    rng = np.random.default_rng(0)
    a = rng.random((11, 11))
    b = 0.7 * a + 0.3 * rng.random((11, 11))
    ramp = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    w = np.outer(ramp, ramp) / ramp.sum() ** 2
    mean_a, mean_b = (w * a).sum(), (w * b).sum()
    var_a, var_b = (w * (a - mean_a) ** 2).sum(), (w * (b - mean_b) ** 2).sum()
    covariance = (w * (a - mean_a) * (b - mean_b)).sum()
    expected = ((2 * mean_a * mean_b + 1e-4) * (2 * covariance + 9e-4)) / (
        (mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)
    )
    found = image_similarity(torch.from_numpy(a)[None], torch.from_numpy(b)[None])
    assert found.ssim == pytest.approx(expected)
    assert found.psnr == pytest.approx(10 * math.log10(1 / ((a - b) ** 2).mean()))
    assert found.correlation == pytest.approx(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def test_image_similarity_at_its_ends(cells):
    x = cells[0][0]
    same = image_similarity(x, x)
    assert same.ssim == pytest.approx(1)
    assert same.psnr == MAX_PSNR_DB
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    assert image_similarity(x, noise).ssim < 0.1
    assert image_similarity(x, 0.5 * x + 0.1).correlation == pytest.approx(1)  # brightness and contrast apart
    with pytest.raises(DataError, match="of equal shape"):
        image_similarity(x, x[:, :40])


def test_image_row_shows_the_images_in_order():
    red, grey = torch.zeros(3, 4, 4), torch.full((1, 4, 4), 0.5)
    red[0] = 1
    shown = np.asarray(Image.open(io.BytesIO(render_image_row([red, grey], ["one", "two"]))).convert("RGB"))
    middle = shown.shape[0] * 5 // 9
    assert shown[middle, shown.shape[1] // 4].tolist() == [255, 0, 0]
    assert shown[middle, shown.shape[1] * 3 // 4].tolist() == pytest.approx([127, 127, 127], abs=2)


def test_update_divided_by_lr_is_the_gradient(small):
    x, y = small
    module, gradient, _ = train_one_step(CNN28(), x[:1], y[:1], 0.1)
    spec = ParameterSpec.from_module(module)
    spec.write_state(
        module, ModelState(spec.read_state(CNN28().init_network((3, 28, 28), CLASSES, 0)).weights, torch.zeros(0))
    )
    assert torch.allclose(gradient, compute_gradient(module, x[:1], y[:1]), atol=1e-4)
