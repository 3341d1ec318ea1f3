"""Feature skew in a simulation: how acquisition differs between sites. Applied to train, val and test alike.

Sites are numbered from 0 (`site_index`); `seed` is the study's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from pipeline.core.errors import IncompatibleStudyError
from pipeline.core.registry import Component, suggest_names
from pipeline.core.seeding import derive_seed
from sites.population.scanner_profiles import SCANNER_PROFILES, ScannerProfile, sample_profile


class FeatureSkew(Component):
    @abstractmethod
    def apply(self, x: Tensor, site_index: int, seed: int) -> Tensor | None:
        """The examples x (n, ...) as this site acquires them; None: x stays as it is."""

    def describe(self, site_index: int, seed: int) -> str:
        """A phrase for reports; empty if the site's acquisition does not differ."""
        return ""


class NoFeatureSkew(FeatureSkew):
    name: Literal["none"] = "none"

    def apply(self, x: Tensor, site_index: int, seed: int) -> Tensor | None:
        return None


class PlaneSkew(FeatureSkew):
    """Rotates points of the plane by `theta`, then translates them by (dx, dy), at the first `sites` sites.

    x' = x cos(theta) - y sin(theta) + dx, y' = x sin(theta) + y cos(theta) + dy
    """

    name: Literal["plane"] = "plane"
    sites: NonNegativeInt = 0
    dx: float = 0.0
    dy: float = 0.0
    theta: float = 0.0  # radians

    def apply(self, x: Tensor, site_index: int, seed: int) -> Tensor | None:
        if x.dim() != 2 or x.shape[1] != 2:
            raise IncompatibleStudyError(
                f"feature_skew 'plane' moves points of the plane, not data of shape {tuple(x.shape[1:])}; "
                "use data 'moons'"
            )
        if site_index >= self.sites:
            return None
        cos, sin = math.cos(self.theta), math.sin(self.theta)
        rotated = x @ torch.tensor([[cos, sin], [-sin, cos]], dtype=x.dtype)
        return rotated + torch.tensor([self.dx, self.dy], dtype=x.dtype)

    def describe(self, site_index: int, seed: int) -> str:
        if site_index >= self.sites:
            return ""
        rotation = f"rotated by {self.theta:g} rad" if self.theta else ""
        translation = f"moved by ({self.dx:g}, {self.dy:g})" if self.dx or self.dy else ""
        return " and ".join(filter(None, (rotation, translation)))


Orientation = Literal["as_is", "inverted", "mirrored", "turned_90", "turned_180", "turned_270"]
ORIENTATION_DESCRIPTIONS: Mapping[Orientation, str] = {"as_is": "", "inverted": "dark and light swapped", "mirrored": "left and right swapped",
                             "turned_90": "rotated by 90 degrees", "turned_180": "upside down",
                             "turned_270": "rotated by 270 degrees"}  # fmt: skip


class OrientationSkew(FeatureSkew):
    """Site i has the orientation `kinds[i % len(kinds)]`: planted clusters for clustered strategies to recover."""

    name: Literal["views"] = "views"
    kinds: tuple[Orientation, ...] = Field(("as_is", "turned_180"), min_length=1)

    def apply(self, x: Tensor, site_index: int, seed: int) -> Tensor | None:
        if x.dim() != 4:
            raise IncompatibleStudyError(
                f"feature_skew 'views' rotates images, not data of shape {tuple(x.shape[1:])}; "
                "use feature_skew 'plane' for points"
            )
        orientation = self.kinds[site_index % len(self.kinds)]
        match orientation:
            case "as_is":
                return None
            case "inverted":
                return 255 - x if x.dtype == torch.uint8 else 1 - x
            case "mirrored":
                return x.flip(-1)
            case _:
                return torch.rot90(x, int(orientation.removeprefix("turned_")) // 90, (-2, -1)).contiguous()

    def describe(self, site_index: int, seed: int) -> str:
        return ORIENTATION_DESCRIPTIONS[self.kinds[site_index % len(self.kinds)]]


class AcquisitionSkew(FeatureSkew):
    """Base of the skews by stain, microscope and camera. `strength`: 0 changes nothing, 1 is the profile itself."""

    strength: float = Field(1.0, ge=0, le=1.5)

    @abstractmethod
    def scanner_profile(self, site_index: int, seed: int) -> ScannerProfile: ...

    def apply(self, x: Tensor, site_index: int, seed: int) -> Tensor | None:
        if x.dim() != 4 or x.shape[1] not in (1, 3) or x.dtype != torch.uint8:
            raise IncompatibleStudyError(
                f"feature_skew {self.name!r} changes 8-bit images with 1 or 3 channels, not data of shape "
                f"{tuple(x.shape[1:])} and type {x.dtype}; use feature_skew 'plane' for points, or 'none'"
            )
        profile = self.scanner_profile(site_index, seed)
        if not profile.has_effect:
            return None
        from sites.population.scanner_transforms import apply_scanner_profile

        return apply_scanner_profile(x, profile, lambda row: derive_seed(seed, site_index, row, self.name))


class ScannerSkew(AcquisitionSkew):
    """Site i has the scanner `profiles[i % len(profiles)]`."""

    name: Literal["scanner"] = "scanner"
    profiles: tuple[str, ...] = Field(("warm_lamp", "dark_giemsa", "old_camera", "phone"), min_length=1)

    @field_validator("profiles")
    @classmethod
    def _check_profiles(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in SCANNER_PROFILES:
                context = {"given": repr(name), "valid": suggest_names(name, SCANNER_PROFILES)}
                raise PydanticCustomError("unknown_profile", "{given} is not known; {valid}", context)
        return names

    def scanner_profile(self, site_index: int, seed: int) -> ScannerProfile:
        return SCANNER_PROFILES[self.profiles[site_index % len(self.profiles)]].with_strength(self.strength)

    def describe(self, site_index: int, seed: int) -> str:
        if not self.strength:
            return ""
        name = self.profiles[site_index % len(self.profiles)]
        strength = "" if self.strength == 1 else f" at strength {self.strength:g}"
        return f"{name}{strength}: {SCANNER_PROFILES[name].description}"


class RandomScannerSkew(AcquisitionSkew):
    """Every site has its own profile, sampled with the study's seed."""

    name: Literal["random_scanner"] = "random_scanner"

    def scanner_profile(self, site_index: int, seed: int) -> ScannerProfile:
        rng = np.random.default_rng(derive_seed(seed, site_index, self.name))
        profile = sample_profile(rng).with_strength(self.strength)
        return replace(profile, description=profile.effect_summary)

    def describe(self, site_index: int, seed: int) -> str:
        return self.scanner_profile(site_index, seed).description if self.strength else ""
