"""Feature skew of synthetic cells: the same seed gives the same images, independent of other sites and images."""

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

STRONG_PROFILES = ScannerSkew().profiles
names = st.sampled_from(sorted(SCANNER_PROFILES))


def make_cell_images(n: int = 6, channels: int = 3, size: int = 36) -> torch.Tensor:
    """Round pink cells on greenish glass with noise; uint8 (n, C, size, size)."""
    axis = torch.linspace(-1, 1, size)
    radius = (axis[:, None] ** 2 + axis**2).sqrt()
    inside = torch.sigmoid((torch.linspace(0.4, 0.7, n)[:, None, None] - radius) * 20)[:, None]
    glass, cell = torch.tensor([165.0, 175.0, 165.0]), torch.tensor([140.0, 100.0, 125.0])
    light = glass.view(3, 1, 1) * (1 - inside) + cell.view(3, 1, 1) * inside
    noise = torch.randn(light.shape, generator=seeded_generator("cells", n, size)) * 3
    return (light + noise).round().clamp(0, 255).to(torch.uint8)[:, :channels].contiguous()


@pytest.mark.parametrize("skew", [ScannerSkew(), RandomScannerSkew()], ids=lambda s: s.name)
def test_scanner_skew_is_deterministic_and_differs_between_sites(skew):
    x = make_cell_images()
    by_site = [skew.apply(x, site, 7) for site in range(4)]
    for site, y in enumerate(by_site):
        assert y.dtype == torch.uint8
        assert y.shape == x.shape
        assert y.is_contiguous()
        assert torch.equal(y, skew.apply(x, site, 7))
        assert not torch.equal(y, x)
        assert not any(torch.equal(y, other) for other in by_site[:site])


def test_scanner_skew_does_not_modify_its_input():
    x = make_cell_images()
    ScannerSkew(profiles=("phone",)).apply(x, 0, 0)
    assert torch.equal(x, make_cell_images())


def test_scanner_skew_profiles_repeat_after_the_last():
    skew = ScannerSkew(profiles=("pale_stain", "acid_buffer"))
    x = make_cell_images()
    assert torch.equal(skew.apply(x, 0, 1), skew.apply(x, 2, 1))  # neither profile has a random effect
    assert skew.describe(2, 1) == "pale_stain: old stain, washed out"


@pytest.mark.parametrize("profile", STRONG_PROFILES)
def test_scanner_skew_does_not_depend_on_other_images_or_threads(profile, monkeypatch):
    from sites.population import scanner_transforms

    skew, x = ScannerSkew(profiles=(profile,)), make_cell_images(10)
    all_images = skew.apply(x, 0, 3)
    assert torch.equal(skew.apply(x[:4], 0, 3), all_images[:4])
    monkeypatch.setattr(scanner_transforms, "IMAGES_PER_TASK", 1)
    for threads in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        assert torch.equal(skew.apply(x, 0, 3), all_images)


def test_scanner_skew_noise_differs_between_images_seeds_and_sites():
    x, noisy = make_cell_images(1).expand(3, -1, -1, -1), ScannerSkew(profiles=("old_camera",))
    y = noisy.apply(x, 0, 0)
    assert not torch.equal(y[0], y[1])
    assert not torch.equal(y, noisy.apply(x, 0, 1))
    assert not torch.equal(y, noisy.apply(x, 1, 0))


@pytest.mark.parametrize(
    "skew", [ScannerSkew(strength=0), RandomScannerSkew(strength=0), ScannerSkew(profiles=("reference",))]
)
def test_scanner_skew_strength_0_and_reference_change_nothing(skew):
    assert skew.apply(make_cell_images(), 1, 5) is None
    assert not skew.scanner_profile(1, 5).has_effect


@settings(max_examples=25, deadline=None)
@given(name=names, strength=st.floats(0, 1.5))
def test_scanner_profile_with_strength(name, strength):
    profile = SCANNER_PROFILES[name]
    assert profile.with_strength(1) == profile
    assert not profile.with_strength(0).has_effect
    y = ScannerSkew(profiles=(name,), strength=strength).apply(make_cell_images(2), 0, 0)
    assert y is None or (y.dtype == torch.uint8 and y.float().std() > 2)  # the cell is still visible


def test_scanner_skew_distance_grows_with_strength():
    x = make_cell_images()
    for name in STRONG_PROFILES:
        distances = [
            (ScannerSkew(profiles=(name,), strength=s).apply(x, 0, 0).float() - x).abs().mean() for s in (0.1, 0.5, 1)
        ]
        assert distances == sorted(distances)


def test_scanner_stain_keeps_glass_and_lamp_tints_it():
    glass = torch.full((1, 3, 30, 30), 160, dtype=torch.uint8)
    assert torch.equal(ScannerSkew(profiles=("acid_buffer",)).apply(glass, 0, 0), glass)
    red, green, blue = ScannerSkew(profiles=("warm_lamp",)).apply(glass, 0, 0).float().mean((0, 2, 3))
    assert red > green > blue


def test_stain_matrix_scales_dyes_separately_and_keeps_grey():
    from sites.population.scanner_transforms import STAIN_VECTORS, stain_matrix

    azure, eosin = STAIN_VECTORS
    assert stain_matrix(2.0, 1.0, 0.0) @ azure == pytest.approx(2 * azure)
    assert stain_matrix(2.0, 1.0, 0.0) @ eosin == pytest.approx(eosin)
    assert stain_matrix(1.0, 1.0, 0.0) == pytest.approx(torch.eye(3).numpy(), abs=1e-12)
    assert stain_matrix(1.0, 1.0, 30.0) @ [1, 1, 1] == pytest.approx([1, 1, 1])


def test_vignette_transform_darkens_towards_the_corners():
    import numpy as np

    from sites.population.scanner_transforms import VignetteTransform

    glass = np.full((72, 72, 1), 200, np.uint8)
    middle, right = (VignetteTransform(0.4).apply(glass, crop_center=center) for center in ((0.0, 0.0), (0.0, 0.9)))
    assert middle.mean() > 198
    assert right.mean() < 140
    assert np.all(np.diff(right[36, :, 0].astype(int)) <= 0)


def test_scanner_skew_of_black_white_and_empty_images():
    for level in (0, 255):
        flat = torch.full((2, 3, 8, 8), level, dtype=torch.uint8)
        for site in range(4):
            assert ScannerSkew(strength=1.5).apply(flat, site, 0).shape == flat.shape
    assert ScannerSkew().apply(make_cell_images()[:0], 0, 0).shape == (0, 3, 36, 36)


@pytest.mark.parametrize("name", sorted(SCANNER_PROFILES))
def test_scanner_skew_of_grey_images(name):
    x = make_cell_images(channels=1)
    y = ScannerSkew(profiles=(name,)).apply(x, 0, 0)
    assert y is None if name == "reference" else y.shape == x.shape


def test_scanner_skew_profiles_differ_in_grey_images():
    x = make_cell_images(channels=1)
    by_site = [ScannerSkew().apply(x, site, 0) for site in range(4)]
    assert all(not torch.equal(a, b) for n, a in enumerate(by_site) for b in by_site[:n])


@pytest.mark.parametrize("skew", [ScannerSkew(), RandomScannerSkew(), ScannerSkew(strength=0)])
@pytest.mark.parametrize("x", [torch.rand(5, 2), torch.rand(2, 3, 8, 8), torch.zeros(2, 4, 8, 8, dtype=torch.uint8)])
def test_scanner_skew_refuses_other_data_with_the_cure(skew, x):
    with pytest.raises(IncompatibleStudyError, match="use feature_skew 'plane' for points, or 'none'"):
        skew.apply(x, 0, 0)


def test_scanner_skew_unknown_profile_lists_the_names():
    with pytest.raises(
        ValidationError, match=r"'warm_lmap' is not known; did you mean 'warm_lamp'.*valid: acid_buffer"
    ):
        ScannerSkew(profiles=("warm_lmap",))
    for bad in ({"profiles": ()}, {"strength": 1.6}, {"strength": -0.1}):
        with pytest.raises(ValidationError):
            ScannerSkew(**bad)


@given(site=st.integers(0, 50), seed=st.integers(0, 2**31), strength=st.floats(0, 1.5))
def test_random_scanner_skew_stays_in_bounds_and_is_described(site, seed, strength):
    skew = RandomScannerSkew(strength=strength)
    profile = skew.scanner_profile(site, seed)
    assert profile == skew.scanner_profile(site, seed)
    assert 0 <= profile.vignette < 0.6
    assert 0 < profile.resolution <= 1
    assert 5 <= profile.jpeg <= 100
    assert bool(skew.describe(site, seed)) == (strength > 0)


def test_feature_skew_describe():
    assert NoFeatureSkew().describe(0, 0) == ""
    assert PlaneSkew(sites=1, dx=2, theta=0.5).describe(0, 0) == "rotated by 0.5 rad and moved by (2, 0)"
    assert PlaneSkew(sites=1, dx=2).describe(1, 0) == ""
    assert ScannerSkew().describe(4, 0) == "warm_lamp: old tungsten lamp: orange glass, soft"
    assert ScannerSkew(strength=0.5).describe(0, 0).startswith("warm_lamp at strength 0.5: ")
    assert ScannerSkew(strength=0).describe(0, 0) == ""


def test_feature_skews_are_registered():
    assert {"none", "plane", "scanner", "random_scanner"} <= set(registered_components("feature_skews"))


def test_feature_skew_imports_nothing_heavy_and_opens_no_connection():
    code = """
import sys, sites.population.feature_skew, sites.population.color_normalization
heavy = {"albumentations", "cv2", "scipy"} & set(sys.modules)
assert not heavy, heavy
import socket
def refuse(*_): raise AssertionError("a network connection is opened")
socket.socket.connect = refuse
import torch
sites.population.feature_skew.ScannerSkew().apply(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), 0, 0)
"""
    environment = {k: v for k, v in os.environ.items() if k != "NO_ALBUMENTATIONS_UPDATE"}
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


ORIENTATIONS = ("as_is", "inverted", "mirrored", "turned_90", "turned_180", "turned_270")


def test_orientation_skew_transforms_images_by_site():
    x = torch.arange(2 * 1 * 3 * 4, dtype=torch.uint8).view(2, 1, 3, 4)
    skew = OrientationSkew(kinds=ORIENTATIONS)
    assert skew.apply(x, 0, 0) is None
    assert skew.apply(x, 6, 0) is None  # repeats after the last kind
    assert torch.equal(skew.apply(x, 1, 0), 255 - x)
    assert skew.apply(x, 2, 0)[0, 0, 0].tolist() == [3, 2, 1, 0]
    assert skew.apply(x, 3, 0)[0, 0, 0].tolist() == [3, 7, 11]
    assert skew.apply(x, 4, 0)[0, 0, 0].tolist() == [11, 10, 9, 8]
    assert skew.apply(x, 5, 0)[0, 0, 0].tolist() == [8, 4, 0]
    assert torch.equal(OrientationSkew(kinds=("inverted",)).apply(x / 255, 0, 0), 1 - x / 255)
    assert [bool(skew.describe(n, 0)) for n in range(6)] == [False, *[True] * 5]


def test_orientation_skew_refuses_points():
    with pytest.raises(IncompatibleStudyError, match="plane"):
        OrientationSkew().apply(torch.zeros(3, 2), 1, 0)
