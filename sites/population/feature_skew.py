"""Per-site feature skew: how a site's acquisition differs. Applied to train, val and test alike."""

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

from pipeline.core.errors import Refused
from pipeline.core.registry import Component, near
from pipeline.core.seeding import seed_of
from sites.population.scanner_profiles import PROFILES, Acquisition, drawn


class Skew(Component):
    @abstractmethod
    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        """x of site number `site` (from 0) as that site sees it; None where nothing changes."""

    def describe(self, site: int, seed: int) -> str:
        """How site number `site` sees, in words for people; empty where there is nothing to say."""
        return ""


class NoSkew(Skew):
    name: Literal["none"] = "none"

    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        return None


class Plane(Skew):
    """Points of the plane, moved and turned (x' = x cos - y sin, y' = x sin + y cos) at the first `sites` sites."""

    name: Literal["plane"] = "plane"
    sites: NonNegativeInt = 0
    dx: float = 0.0
    dy: float = 0.0
    theta: float = 0.0  # radians

    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        if x.dim() != 2 or x.shape[1] != 2:
            raise Refused(
                f"skew 'plane' moves points of the plane, not data of shape {tuple(x.shape[1:])}; use data 'moons'"
            )
        if site >= self.sites:
            return None
        cos, sin = math.cos(self.theta), math.sin(self.theta)
        turned = x @ torch.tensor([[cos, sin], [-sin, cos]], dtype=x.dtype)
        return turned + torch.tensor([self.dx, self.dy], dtype=x.dtype)

    def describe(self, site: int, seed: int) -> str:
        if site >= self.sites:
            return ""
        turned = f"turned by {self.theta:g} rad" if self.theta else ""
        moved = f"moved by ({self.dx:g}, {self.dy:g})" if self.dx or self.dy else ""
        return " and ".join(filter(None, (turned, moved)))


View = Literal["as_is", "inverted", "mirrored", "turned_90", "turned_180", "turned_270"]
WORDS: Mapping[View, str] = {"as_is": "", "inverted": "dark and light swapped", "mirrored": "left and right swapped",
                             "turned_90": "turned by 90 degrees", "turned_180": "upside down",
                             "turned_270": "turned by 270 degrees"}  # fmt: skip


class Views(Skew):
    """Site i sees images as `kinds[i]` says, beginning again after the last: populations planted to be found again."""

    name: Literal["views"] = "views"
    kinds: tuple[View, ...] = Field(("as_is", "turned_180"), min_length=1)

    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        if x.dim() != 4:
            raise Refused(
                f"skew 'views' turns images, not data of shape {tuple(x.shape[1:])}; use skew 'plane' for points"
            )
        kind = self.kinds[site % len(self.kinds)]
        match kind:
            case "as_is":
                return None
            case "inverted":
                return 255 - x if x.dtype == torch.uint8 else 1 - x
            case "mirrored":
                return x.flip(-1)
            case _:
                return torch.rot90(x, int(kind.removeprefix("turned_")) // 90, (-2, -1)).contiguous()

    def describe(self, site: int, seed: int) -> str:
        return WORDS[self.kinds[site % len(self.kinds)]]


class Microscope(Skew):
    """Base of the skews that change how images are taken; `strength` 0 changes nothing, 1 is as named, 1.5 the most."""

    strength: float = Field(1.0, ge=0, le=1.5)

    @abstractmethod
    def acquisition(self, site: int, seed: int) -> Acquisition: ...

    def apply(self, x: Tensor, site: int, seed: int) -> Tensor | None:
        if x.dim() != 4 or x.shape[1] not in (1, 3) or x.dtype != torch.uint8:
            raise Refused(
                f"skew {self.name!r} changes images of 8 bits with 1 or 3 channels, not data of shape "
                f"{tuple(x.shape[1:])} and type {x.dtype}; use skew 'plane' for points, or 'none'"
            )
        seen = self.acquisition(site, seed)
        if not seen.changes:
            return None
        from sites.population.scanner_transforms import see

        return see(x, seen, lambda row: seed_of(seed, site, row, self.name))


class Scanner(Microscope):
    """Site i sees through `profiles[i]`, beginning again after the last."""

    name: Literal["scanner"] = "scanner"
    profiles: tuple[str, ...] = Field(("warm_lamp", "dark_giemsa", "old_camera", "phone"), min_length=1)

    @field_validator("profiles")
    @classmethod
    def _known(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for name in given:
            if name not in PROFILES:
                valid = {"given": repr(name), "valid": near(name, PROFILES)}
                raise PydanticCustomError("unknown_profile", "{given} is not known; {valid}", valid)
        return given

    def acquisition(self, site: int, seed: int) -> Acquisition:
        return PROFILES[self.profiles[site % len(self.profiles)]].at(self.strength)

    def describe(self, site: int, seed: int) -> str:
        if not self.strength:
            return ""
        name = self.profiles[site % len(self.profiles)]
        return f"{name}{'' if self.strength == 1 else f' at strength {self.strength:g}'}: {PROFILES[name].about}"


class RandomScanner(Microscope):
    """Every site has an acquisition of its own, drawn from the study's seed."""

    name: Literal["random_scanner"] = "random_scanner"

    def acquisition(self, site: int, seed: int) -> Acquisition:
        seen = drawn(np.random.default_rng(seed_of(seed, site, self.name))).at(self.strength)
        return replace(seen, about=seen.words)

    def describe(self, site: int, seed: int) -> str:
        return self.acquisition(site, seed).about if self.strength else ""
