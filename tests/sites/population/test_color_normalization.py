"""Normalisers on random cells: they hit their targets, and nothing divides by zero."""

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

ALL = [SiteNormalization(), ImageNormalization(), BackgroundNormalization(), BackgroundNormalization(density=False)]
ids = ["site", "image", "background", "background-glass"]
each = pytest.mark.parametrize("how", ALL, ids=ids)


def smear(n: int = 20, glass: tuple[float, ...] = (160, 170, 150), depth: float = 0.4, seed: int = 0) -> torch.Tensor:
    """A disc of optical density about `depth` on glass, with grain; uint8 (n, C, 24, 24)."""
    axis = torch.linspace(-1, 1, 24)
    cell = ((axis[:, None] ** 2 + axis**2) < 0.45).float() * depth
    light = torch.tensor(glass).view(-1, 1, 1) * torch.exp(-cell)
    grain = torch.randn(n, len(glass), 24, 24, generator=seeded_generator("smear", seed)) * 2
    return (light + grain).round().clamp(0, 255).to(torch.uint8)


def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x))


def moments(x: torch.Tensor, over: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    std, mean = torch.std_mean(x.double() / 255, over, correction=0)
    return mean, std


def test_none_changes_nothing_and_takes_anything():
    assert NoColorNormalization().apply(torch.rand(4, 2), torch.arange(0)) is None


@each
def test_images_in_images_out(how: ColorNormalization):
    x = smear()
    y = how.apply(x, rows(x))
    assert y is not None
    assert y.dtype == torch.uint8
    assert y.shape == x.shape
    assert torch.equal(x, smear())


@settings(max_examples=30, deadline=None)
@given(glass=st.tuples(*[st.floats(90, 240)] * 3), depth=st.floats(0.1, 0.9), mean=st.floats(0.5, 0.65))
def test_site_and_image_hit_mean_and_std(glass, depth, mean):
    x = smear(6, glass, depth)
    for how, over in ((SiteNormalization(mean=mean), (0, 2, 3)), (ImageNormalization(mean=mean), (2, 3))):
        got, std = moments(how.apply(x, rows(x)), over)
        assert got.sub(mean).abs().max() < 0.01
        assert std.sub(0.13).abs().max() < 0.01


@settings(max_examples=30, deadline=None)
@given(glass=st.tuples(*[st.floats(90, 240)] * 3), depth=st.floats(0.1, 0.9))
def test_background_sets_glass_and_density(glass, depth):
    x = smear(6, glass, depth)
    y = BackgroundNormalization().apply(x, rows(x)).double() / 255
    corner, disc = y[:, :, :4, :4].mean((0, 2, 3)), y[:, :, 10:14, 10:14].mean((0, 2, 3))
    assert corner.sub(0.8).abs().max() < 0.06  # grain is amplified with the density
    assert (corner / disc).log().sub(torch.tensor(TARGET_OPTICAL_DENSITY)).abs().max() < 0.15


def test_background_without_density_keeps_the_stain():
    deep, pale = (
        BackgroundNormalization(density=False).apply(x, rows(x)).double() for x in (smear(depth=0.6), smear(depth=0.2))
    )
    assert (deep[..., 0, 0].mean() / deep[..., 12, 12].mean()).log() == pytest.approx(0.6, abs=0.03)
    assert (pale[..., 0, 0].mean() / pale[..., 12, 12].mean()).log() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("how", [SiteNormalization(), BackgroundNormalization()], ids=["site", "background"])
def test_sites_that_differ_become_alike(how: ColorNormalization):
    sites = [smear(), smear(glass=(220, 150, 90), depth=0.25), smear(glass=(100, 120, 130), depth=0.7)]
    before = torch.stack([moments(x, (0, 2, 3))[0] for x in sites]).std(0).mean()
    after = torch.stack([moments(how.apply(x, rows(x)), (0, 2, 3))[0] for x in sites]).std(0).mean()
    assert after < before / 5


@each
def test_twice_is_nearly_once(how: ColorNormalization):
    once = how.apply(smear(), torch.arange(20))
    assert once is not None
    twice = how.apply(once, torch.arange(20))
    assert twice is not None
    assert (twice.int() - once.int()).abs().float().mean() < 2


@each
def test_only_training_rows_are_measured(how: ColorNormalization):
    train, other = smear(8), smear(4, (90, 200, 240), 0.8, seed=1)
    alone, together = how.apply(train, rows(train)), how.apply(torch.cat([train, other]), rows(train))
    assert alone is not None
    assert together is not None
    assert torch.equal(together[:8], alone)


@each
@pytest.mark.parametrize("level", [0, 1, 128, 255])
@pytest.mark.parametrize("channels", [1, 3])
def test_constant_images_divide_by_nothing(how: ColorNormalization, level: int, channels: int):
    x = torch.full((3, channels, 8, 8), level, dtype=torch.uint8)
    y = how.apply(x, rows(x))
    assert y is not None
    assert (y == y[0, 0, 0, 0]).all()
    assert level == 0 or y[0, 0, 0, 0] in (153, 204)  # the mean or the glass that was asked for


@each
def test_grey_images(how: ColorNormalization):
    x = smear(glass=(150,))
    y = how.apply(x, rows(x))
    assert y is not None
    assert y.shape == x.shape
    assert not torch.equal(y, x)


@each
def test_many_images_are_taken_in_steps_without_a_seam(how: ColorNormalization, monkeypatch):
    x = smear(12)
    whole = how.apply(x, rows(x))
    monkeypatch.setattr("sites.population.color_normalization.CHUNK", 5)
    assert torch.equal(how.apply(x, rows(x)), whole)


@each
def test_refusals_say_the_cure(how: ColorNormalization):
    for bad in (torch.rand(5, 2), torch.rand(2, 3, 8, 8)):
        with pytest.raises(IncompatibleStudyError, match=r"needs images of 8 bits.*use normalise 'none'"):
            how.apply(bad, torch.arange(2))
    with pytest.raises(IncompatibleStudyError, match="has none; use 'none'"):
        how.apply(smear(), torch.arange(0))
