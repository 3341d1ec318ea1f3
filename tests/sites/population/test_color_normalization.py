"""Colour normalisation of random cell images: it reaches its targets and never divides by zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.seeding import seeded_generator
from sites.data.color_tables import TARGET_OPTICAL_DENSITY
from sites.population.color_normalization import (
    BackgroundNormalization,
    ColorNormalization,
    ImageNormalization,
    NoColorNormalization,
    SiteNormalization,
)

NORMALIZATIONS = [
    SiteNormalization(),
    ImageNormalization(),
    BackgroundNormalization(),
    BackgroundNormalization(density=False),
]
NORMALIZATION_IDS = ["site", "image", "background", "background-glass"]
each_normalization = pytest.mark.parametrize("normalization", NORMALIZATIONS, ids=NORMALIZATION_IDS)


def make_cell_images(
    n: int = 20, glass: tuple[float, ...] = (160, 170, 150), depth: float = 0.4, seed: int = 0
) -> torch.Tensor:
    """Discs of optical density `depth` on glass with noise; uint8 (n, C, 24, 24)."""
    axis = torch.linspace(-1, 1, 24)
    cell = ((axis[:, None] ** 2 + axis**2) < 0.45).float() * depth
    light = torch.tensor(glass).view(-1, 1, 1) * torch.exp(-cell)
    noise = torch.randn(n, len(glass), 24, 24, generator=seeded_generator("smear", seed)) * 2
    return (light + noise).round().clamp(0, 255).to(torch.uint8)


def all_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x))


def channel_moments(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    std, mean = torch.std_mean(x.double() / 255, dims, correction=0)
    return mean, std


def test_no_color_normalization_changes_nothing():
    assert NoColorNormalization().apply(torch.rand(4, 2), torch.arange(0)) is None


@each_normalization
def test_color_normalization_keeps_dtype_shape_and_input(normalization: ColorNormalization):
    x = make_cell_images()
    y = normalization.apply(x, all_rows(x))
    assert y is not None
    assert y.dtype == torch.uint8
    assert y.shape == x.shape
    assert torch.equal(x, make_cell_images())


@settings(max_examples=30, deadline=None)
@given(glass=st.tuples(*[st.floats(90, 240)] * 3), depth=st.floats(0.1, 0.9), mean=st.floats(0.5, 0.65))
def test_site_and_image_normalization_hit_mean_and_std(glass, depth, mean):
    x = make_cell_images(6, glass, depth)
    for normalization, dims in ((SiteNormalization(mean=mean), (0, 2, 3)), (ImageNormalization(mean=mean), (2, 3))):
        actual_mean, std = channel_moments(normalization.apply(x, all_rows(x)), dims)
        assert actual_mean.sub(mean).abs().max() < 0.01
        assert std.sub(0.13).abs().max() < 0.01


@settings(max_examples=30, deadline=None)
@given(glass=st.tuples(*[st.floats(90, 240)] * 3), depth=st.floats(0.1, 0.9))
def test_background_normalization_sets_glass_and_density(glass, depth):
    x = make_cell_images(6, glass, depth)
    y = BackgroundNormalization().apply(x, all_rows(x)).double() / 255
    corner, disc = y[:, :, :4, :4].mean((0, 2, 3)), y[:, :, 10:14, 10:14].mean((0, 2, 3))
    assert corner.sub(0.8).abs().max() < 0.06  # noise is amplified with the density
    assert (corner / disc).log().sub(torch.tensor(TARGET_OPTICAL_DENSITY)).abs().max() < 0.15


def test_background_normalization_without_density_keeps_the_stain():
    deep, pale = (
        BackgroundNormalization(density=False).apply(x, all_rows(x)).double()
        for x in (make_cell_images(depth=0.6), make_cell_images(depth=0.2))
    )
    assert (deep[..., 0, 0].mean() / deep[..., 12, 12].mean()).log() == pytest.approx(0.6, abs=0.03)
    assert (pale[..., 0, 0].mean() / pale[..., 12, 12].mean()).log() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("normalization", [SiteNormalization(), BackgroundNormalization()], ids=["site", "background"])
def test_color_normalization_brings_sites_closer(normalization: ColorNormalization):
    sites = [
        make_cell_images(),
        make_cell_images(glass=(220, 150, 90), depth=0.25),
        make_cell_images(glass=(100, 120, 130), depth=0.7),
    ]
    before = torch.stack([channel_moments(x, (0, 2, 3))[0] for x in sites]).std(0).mean()
    after = (
        torch.stack([channel_moments(normalization.apply(x, all_rows(x)), (0, 2, 3))[0] for x in sites]).std(0).mean()
    )
    assert after < before / 5


@each_normalization
def test_color_normalization_is_nearly_idempotent(normalization: ColorNormalization):
    once = normalization.apply(make_cell_images(), torch.arange(20))
    assert once is not None
    twice = normalization.apply(once, torch.arange(20))
    assert twice is not None
    assert (twice.int() - once.int()).abs().float().mean() < 2


@each_normalization
def test_color_normalization_measures_training_rows_only(normalization: ColorNormalization):
    train, other = make_cell_images(8), make_cell_images(4, (90, 200, 240), 0.8, seed=1)
    alone = normalization.apply(train, all_rows(train))
    together = normalization.apply(torch.cat([train, other]), all_rows(train))
    assert alone is not None
    assert together is not None
    assert torch.equal(together[:8], alone)


@each_normalization
@pytest.mark.parametrize("level", [0, 1, 128, 255])
@pytest.mark.parametrize("channels", [1, 3])
def test_color_normalization_of_constant_images(normalization: ColorNormalization, level: int, channels: int):
    x = torch.full((3, channels, 8, 8), level, dtype=torch.uint8)
    y = normalization.apply(x, all_rows(x))
    assert y is not None
    assert (y == y[0, 0, 0, 0]).all()
    assert level == 0 or y[0, 0, 0, 0] in (153, 204)  # the target mean or the target glass


@each_normalization
def test_color_normalization_of_grey_images(normalization: ColorNormalization):
    x = make_cell_images(glass=(150,))
    y = normalization.apply(x, all_rows(x))
    assert y is not None
    assert y.shape == x.shape
    assert not torch.equal(y, x)


@each_normalization
def test_color_normalization_in_steps_gives_the_same(normalization: ColorNormalization, monkeypatch):
    x = make_cell_images(12)
    in_one_step = normalization.apply(x, all_rows(x))
    monkeypatch.setattr("sites.population.color_normalization.IMAGES_PER_STEP", 5)
    assert torch.equal(normalization.apply(x, all_rows(x)), in_one_step)


@each_normalization
def test_color_normalization_errors_name_the_cure(normalization: ColorNormalization):
    for bad in (torch.rand(5, 2), torch.rand(2, 3, 8, 8)):
        with pytest.raises(IncompatibleStudyError, match=r"needs 8-bit images.*use normalization 'none'"):
            normalization.apply(bad, torch.arange(2))
    with pytest.raises(IncompatibleStudyError, match="has none; use normalization 'none'"):
        normalization.apply(make_cell_images(), torch.arange(0))
