"""Scanners on drawn cells: the same seed sees the same, whoever else is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.registry import registered_components
from pipeline.core.seeding import seeded_generator
from sites.population.feature_skew import NoFeatureSkew, OrientationSkew, PlaneSkew, RandomScannerSkew, ScannerSkew
from sites.population.scanner_profiles import SCANNER_PROFILES

STRONG = ScannerSkew().profiles
names = st.sampled_from(sorted(SCANNER_PROFILES))


def drawn_cells(n: int = 6, channels: int = 3, size: int = 36) -> torch.Tensor:
    """Round pink cells on greenish glass, with some grain; uint8 (n, C, size, size)."""
    axis = torch.linspace(-1, 1, size)
    far = (axis[:, None] ** 2 + axis**2).sqrt()
    inside = torch.sigmoid((torch.linspace(0.4, 0.7, n)[:, None, None] - far) * 20)[:, None]
    glass, cell = torch.tensor([165.0, 175.0, 165.0]), torch.tensor([140.0, 100.0, 125.0])
    light = glass.view(3, 1, 1) * (1 - inside) + cell.view(3, 1, 1) * inside
    grain = torch.randn(light.shape, generator=seeded_generator("cells", n, size)) * 3
    return (light + grain).round().clamp(0, 255).to(torch.uint8)[:, :channels].contiguous()


@pytest.mark.parametrize("skew", [ScannerSkew(), RandomScannerSkew()], ids=lambda s: s.name)
def test_a_site_sees_the_same_twice_and_other_sites_see_otherwise(skew):
    x = drawn_cells()
    seen = [skew.apply(x, site, 7) for site in range(4)]
    for site, y in enumerate(seen):
        assert y.dtype == torch.uint8
        assert y.shape == x.shape
        assert y.is_contiguous()
        assert torch.equal(y, skew.apply(x, site, 7))
        assert not torch.equal(y, x)
        assert not any(torch.equal(y, other) for other in seen[:site])


def test_the_input_is_left_alone():
    x = drawn_cells()
    ScannerSkew(profiles=("phone",)).apply(x, 0, 0)
    assert torch.equal(x, drawn_cells())


def test_sites_begin_again_after_the_last_profile():
    skew = ScannerSkew(profiles=("pale_stain", "acid_buffer"))
    assert torch.equal(skew.apply(drawn_cells(), 0, 1), skew.apply(drawn_cells(), 2, 1))  # nothing random in these two
    assert skew.describe(2, 1) == "pale_stain: old stain, washed out"


@pytest.mark.parametrize("profile", STRONG)
def test_an_example_does_not_depend_on_those_after_it_or_on_threads(profile, monkeypatch):
    from sites.population import scanner_transforms as scanners

    skew, x = ScannerSkew(profiles=(profile,)), drawn_cells(10)
    whole = skew.apply(x, 0, 3)
    assert torch.equal(skew.apply(x[:4], 0, 3), whole[:4])
    monkeypatch.setattr(scanners, "CHUNK", 1)
    for threads in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        assert torch.equal(skew.apply(x, 0, 3), whole)


def test_what_varies_by_image_differs_between_equal_images_seeds_and_sites():
    x, noisy = drawn_cells(1).expand(3, -1, -1, -1), ScannerSkew(profiles=("old_camera",))
    y = noisy.apply(x, 0, 0)
    assert not torch.equal(y[0], y[1])
    assert not torch.equal(y, noisy.apply(x, 0, 1))
    assert not torch.equal(y, noisy.apply(x, 1, 0))


@pytest.mark.parametrize(
    "skew", [ScannerSkew(strength=0), RandomScannerSkew(strength=0), ScannerSkew(profiles=("reference",))]
)
def test_nothing_changes_at_strength_0_nor_at_the_reference(skew):
    assert skew.apply(drawn_cells(), 1, 5) is None
    assert not skew.acquisition(1, 5).changes


@settings(max_examples=25, deadline=None)
@given(name=names, strength=st.floats(0, 1.5))
def test_any_strength_gives_images_and_at_0_and_1_is_exact(name, strength):
    profile = SCANNER_PROFILES[name]
    assert profile.with_strength(1) == profile
    assert not profile.with_strength(0).has_effect
    y = ScannerSkew(profiles=(name,), strength=strength).apply(drawn_cells(2), 0, 0)
    assert y is None or (y.dtype == torch.uint8 and y.float().std() > 2)  # the cell is still to be seen


def test_a_stronger_one_is_further_away():
    x = drawn_cells()
    for name in STRONG:
        away = [
            (ScannerSkew(profiles=(name,), strength=s).apply(x, 0, 0).float() - x).abs().mean() for s in (0.1, 0.5, 1)
        ]
        assert away == sorted(away)


def test_dyes_leave_glass_alone_and_lamps_do_not():
    glass = torch.full((1, 3, 30, 30), 160, dtype=torch.uint8)
    assert torch.equal(ScannerSkew(profiles=("acid_buffer",)).apply(glass, 0, 0), glass)
    red, green, blue = ScannerSkew(profiles=("warm_lamp",)).apply(glass, 0, 0).float().mean((0, 2, 3))
    assert red > green > blue


def test_dyes_are_scaled_apart_and_grey_is_not_turned():
    from sites.population.scanner_transforms import STAIN_VECTORS, stain_matrix

    azure, eosin = STAIN_VECTORS
    assert stain_matrix(2.0, 1.0, 0.0) @ azure == pytest.approx(2 * azure)
    assert stain_matrix(2.0, 1.0, 0.0) @ eosin == pytest.approx(eosin)
    assert stain_matrix(1.0, 1.0, 0.0) == pytest.approx(torch.eye(3).numpy(), abs=1e-12)
    assert stain_matrix(1.0, 1.0, 30.0) @ [1, 1, 1] == pytest.approx([1, 1, 1])


def test_a_vignetted_crop_is_darker_and_has_a_ramp():
    import numpy as np

    from sites.population.scanner_transforms import VignetteTransform

    glass = np.full((72, 72, 1), 200, np.uint8)
    middle, right = (VignetteTransform(0.4).apply(glass, middle=place) for place in ((0.0, 0.0), (0.0, 0.9)))
    assert middle.mean() > 198
    assert right.mean() < 140
    assert np.all(np.diff(right[36, :, 0].astype(int)) <= 0)


def test_black_and_white_and_tiny_images():
    for level in (0, 255):
        flat = torch.full((2, 3, 8, 8), level, dtype=torch.uint8)
        for site in range(4):
            assert ScannerSkew(strength=1.5).apply(flat, site, 0).shape == flat.shape
    assert ScannerSkew().apply(drawn_cells()[:0], 0, 0).shape == (0, 3, 36, 36)


@pytest.mark.parametrize("name", sorted(SCANNER_PROFILES))
def test_grey_images(name):
    x = drawn_cells(channels=1)
    y = ScannerSkew(profiles=(name,)).apply(x, 0, 0)
    assert y is None if name == "reference" else y.shape == x.shape


def test_strong_profiles_differ_in_grey_too():
    x = drawn_cells(channels=1)
    seen = [ScannerSkew().apply(x, site, 0) for site in range(4)]
    assert all(not torch.equal(a, b) for n, a in enumerate(seen) for b in seen[:n])


@pytest.mark.parametrize("skew", [ScannerSkew(), RandomScannerSkew(), ScannerSkew(strength=0)])
@pytest.mark.parametrize("x", [torch.rand(5, 2), torch.rand(2, 3, 8, 8), torch.zeros(2, 4, 8, 8, dtype=torch.uint8)])
def test_what_is_no_image_is_refused_with_the_cure(skew, x):
    with pytest.raises(IncompatibleStudyError, match="use skew 'plane' for points, or 'none'"):
        skew.apply(x, 0, 0)


def test_a_typo_lists_the_profiles():
    with pytest.raises(
        ValidationError, match=r"'warm_lmap' is not known; did you mean 'warm_lamp'.*valid: acid_buffer"
    ):
        ScannerSkew(profiles=("warm_lmap",))
    for bad in ({"profiles": ()}, {"strength": 1.6}, {"strength": -0.1}):
        with pytest.raises(ValidationError):
            ScannerSkew(**bad)


@given(site=st.integers(0, 50), seed=st.integers(0, 2**31), strength=st.floats(0, 1.5))
def test_random_scanners_stay_in_bounds_and_have_words(site, seed, strength):
    skew = RandomScannerSkew(strength=strength)
    seen = skew.scanner_profile(site, seed)
    assert seen == skew.scanner_profile(site, seed)
    assert 0 <= seen.vignette < 0.6
    assert 0 < seen.resolution <= 1
    assert 5 <= seen.jpeg <= 100
    assert bool(skew.describe(site, seed)) == (strength > 0)


def test_describe():
    assert NoFeatureSkew().describe(0, 0) == ""
    assert PlaneSkew(sites=1, dx=2, theta=0.5).describe(0, 0) == "turned by 0.5 rad and moved by (2, 0)"
    assert PlaneSkew(sites=1, dx=2).describe(1, 0) == ""
    assert ScannerSkew().describe(4, 0) == "warm_lamp: old tungsten lamp: orange glass, soft"
    assert ScannerSkew(strength=0.5).describe(0, 0).startswith("warm_lamp at strength 0.5: ")
    assert ScannerSkew(strength=0).describe(0, 0) == ""


def test_they_are_found_by_name():
    assert {"none", "plane", "scanner", "random_scanner"} <= set(registered_components("feature_skews"))


def test_reading_a_study_imports_nothing_heavy_and_seeing_asks_no_network():
    code = """
import sys, sites.population.feature_skew, sites.population.color_normalization
heavy = {"albumentations", "cv2", "scipy"} & set(sys.modules)
assert not heavy, heavy
import socket
def refuse(*_): raise AssertionError("the network is touched")
socket.socket.connect = refuse
import torch
sites.population.feature_skew.Scanner().apply(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 0, 0)
"""
    clean = {k: v for k, v in os.environ.items() if k != "NO_ALBUMENTATIONS_UPDATE"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=clean)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


VIEWS = ("as_is", "inverted", "mirrored", "turned_90", "turned_180", "turned_270")


def test_views_turn_the_images_of_every_other_site():
    x = torch.arange(2 * 1 * 3 * 4, dtype=torch.uint8).view(2, 1, 3, 4)
    skew = OrientationSkew(kinds=VIEWS)
    assert skew.apply(x, 0, 0) is None
    assert skew.apply(x, 6, 0) is None  # begins again
    assert torch.equal(skew.apply(x, 1, 0), 255 - x)
    assert skew.apply(x, 2, 0)[0, 0, 0].tolist() == [3, 2, 1, 0]
    assert skew.apply(x, 3, 0)[0, 0, 0].tolist() == [3, 7, 11]
    assert skew.apply(x, 4, 0)[0, 0, 0].tolist() == [11, 10, 9, 8]
    assert skew.apply(x, 5, 0)[0, 0, 0].tolist() == [8, 4, 0]
    assert torch.equal(OrientationSkew(kinds=("inverted",)).apply(x / 255, 0, 0), 1 - x / 255)
    assert [bool(skew.describe(n, 0)) for n in range(6)] == [False, *[True] * 5]


def test_views_are_of_images():
    with pytest.raises(IncompatibleStudyError, match="plane"):
        OrientationSkew().apply(torch.zeros(3, 2), 1, 0)
