"""Augmentation: each setting has its documented effect, and the default changes nothing."""

import math

import pytest
import torch

from pipeline.core.seeding import seeded_generator
from sites.training.augmentation import BatchAugmentation


def make_random_images(n=6, size=32, channels=3):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(0))


def make_blob_images(n=4, size=48):
    """A smooth off-centre blob: interpolation between pixels changes it little."""
    axis = (torch.arange(size) * 2 + 1) / size - 1
    blob = torch.exp(-((axis.view(1, -1) - 0.3) ** 2 + (axis.view(-1, 1) + 0.1) ** 2) / 0.05)
    return (0.2 + 0.6 * blob).expand(n, 3, size, size).clone()


def test_augmentation_default_is_the_identity():
    x = make_random_images()
    assert BatchAugmentation().is_identity
    torch.testing.assert_close(BatchAugmentation()(x, seeded_generator(1)), x)


def test_augmentation_follows_the_seed():
    augmentation = BatchAugmentation(flip=True, rotate=180, zoom=0.1, elastic=1.5, color=0.1, light=0.1)
    x = make_random_images()
    assert torch.equal(augmentation(x, seeded_generator(1)), augmentation(x, seeded_generator(1)))
    assert not torch.equal(augmentation(x, seeded_generator(1)), augmentation(x, seeded_generator(2)))


@pytest.mark.parametrize(
    "settings", [{"flip": True}, {"rotate": 180}, {"zoom": 0.2}, {"elastic": 2.0}, {"color": 0.2}, {"light": 0.2}]
)
def test_augmentation_changes_images_and_keeps_shape_and_range(settings):
    x = make_random_images()
    out = BatchAugmentation(**settings)(x.clone(), seeded_generator(5))
    assert out.shape == x.shape
    assert out.dtype == torch.float32
    assert 0 <= float(out.min()) <= float(out.max()) <= 1
    assert (out - x).abs().mean() > 0.01


def test_augmentation_flip_mirrors_about_half():
    x = make_random_images(n=200, size=8)
    out = BatchAugmentation(flip=True)(x, seeded_generator(3))
    same = (out - x).abs().flatten(1).amax(1) < 1e-5
    mirrored = (out - x.flip(-1)).abs().flatten(1).amax(1) < 1e-5
    assert bool((same | mirrored).all())
    assert 70 < int(mirrored.sum()) < 130


def test_augmentation_rotate_keeps_distances_from_the_center():
    x = make_blob_images()
    out = BatchAugmentation(rotate=180)(x, seeded_generator(4))
    axis = (torch.arange(48) * 2 + 1) / 48 - 1
    for image in out[:, 0]:
        mass = (image - 0.2).clamp(min=0)
        cx, cy = float((mass.sum(0) * axis).sum() / mass.sum()), float((mass.sum(1) * axis).sum() / mass.sum())
        assert math.hypot(cx, cy) == pytest.approx(math.hypot(0.3, 0.1), abs=0.02)


def test_augmentation_elastic_displacement_in_pixels():
    size = 48
    ramp = (torch.arange(size) / size).view(1, 1, 1, size).expand(400, 1, size, size)
    out = BatchAugmentation(elastic=2.0)(ramp, seeded_generator(9))
    middle = slice(12, 36)
    displacement = (out - ramp)[..., middle, middle] * size
    # between knots the displacement is interpolated, hence smaller
    assert 1.0 < float(displacement.std()) < 2.1


def test_augmentation_color_scales_channels_and_light_keeps_their_balance():
    x = torch.full((500, 3, 4, 4), 0.5)
    gains = BatchAugmentation(color=0.2)(x, seeded_generator(1)).mean((2, 3)) / 0.5
    assert 0.8 <= float(gains.min()) < 0.82 < 1.18 < float(gains.max()) <= 1.2
    assert float(gains.std(1).mean()) > 0.05
    light = BatchAugmentation(light=0.2)(x, seeded_generator(1)).mean((2, 3)) / 0.5
    assert float(light.std(1).max()) < 1e-5
    assert float(light.std(0).mean()) > 0.05
