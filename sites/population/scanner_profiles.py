"""Scanner profiles: a hospital's stain, microscope and camera as numbers, with named profiles to choose from.

This module is imported with every study, so it imports neither albumentations nor OpenCV; scanner_transforms.py builds
the image pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ScannerProfile:
    """The settings in the order in which they act on the light; the defaults change nothing."""

    description: str = "as it is"
    azure: float = 1.0  # factor of the blue dye's optical density
    eosin: float = 1.0  # factor of the red dye's optical density
    # degrees by which the dyes' colours rotate about the grey axis (the buffer's pH); > 0 is redder, < 0 bluer
    hue_shift: float = 0.0
    lamp: tuple[float, float, float] = (1.0, 1.0, 1.0)  # factors of red, green and blue light
    vignette: float = 0.0  # fraction of light lost in the field's corners
    blur: float = 0.0  # standard deviation in pixels
    resolution: float = 1.0  # camera pixels per image pixel
    noise: float = 0.0  # standard deviation, as a fraction of full scale
    gamma: float = 1.0  # > 1 is darker
    sharpen: float = 0.0  # weight of the unsharp mask
    jpeg: float = 100.0  # quality; 100: no compression

    def with_strength(self, strength: float) -> ScannerProfile:
        """Raises factors to the power `strength` and multiplies amounts by it: 0 is the identity, 1 this profile."""
        return ScannerProfile(
            self.description, **{f.name: _scale_setting(self, f.name, strength) for f in PROFILE_SETTINGS}
        )

    @property
    def has_effect(self) -> bool:
        return any(getattr(self, f.name) != f.default for f in PROFILE_SETTINGS)

    @property
    def effect_summary(self) -> str:
        """A phrase for reports, such as "dark stain, noisy"."""
        return ", ".join(label for label, applies in EFFECT_CONDITIONS.items() if applies(self)) or "nearly as it is"


EFFECT_CONDITIONS: Mapping[str, Callable[[ScannerProfile], bool]] = {
    "dark stain": lambda a: a.azure * a.eosin > 1.2,
    "pale stain": lambda a: a.azure * a.eosin < 0.8,
    "reddish cells": lambda a: a.hue_shift > 8,
    "bluish cells": lambda a: a.hue_shift < -8,
    "warm light": lambda a: a.lamp[0] / a.lamp[2] > 1.15,
    "cold light": lambda a: a.lamp[0] / a.lamp[2] < 0.87,
    "green cast": lambda a: a.lamp[1] ** 2 / (a.lamp[0] * a.lamp[2]) > 1.2,
    "purple cast": lambda a: a.lamp[1] ** 2 / (a.lamp[0] * a.lamp[2]) < 0.83,
    "bright": lambda a: sum(a.lamp) / 3 / a.gamma > 1.15,
    "dim": lambda a: sum(a.lamp) / 3 / a.gamma < 0.87,
    "dark towards the corners": lambda a: a.vignette > 0.1,
    "soft": lambda a: a.blur > 0.4,
    "few pixels": lambda a: a.resolution < 0.8,
    "noisy": lambda a: a.noise > 0.008,
    "sharpened": lambda a: a.sharpen > 0.3,
    "compressed": lambda a: a.jpeg < 80,
}


def _scale_setting(profile: ScannerProfile, setting: str, strength: float | np.ndarray) -> Any:
    """Settings whose neutral value is 1 are factors, all others are amounts."""
    value, neutral = getattr(profile, setting), getattr(ScannerProfile, setting)
    if isinstance(value, tuple):
        return tuple(np.power(value, strength).tolist())
    if neutral == 1:
        return value**strength
    return neutral + (value - neutral) * strength


def sample_profile(rng: np.random.Generator) -> ScannerProfile:
    """Uniform within `MAX_PROFILE`; a one-sided fault (blur, noise, ...) is absent at a third of the sites."""
    amounts = {
        f.name: rng.uniform(-1, 1, 3) if f.name in BIDIRECTIONAL_SETTINGS else rng.uniform(-0.5, 1, 1).clip(0)
        for f in PROFILE_SETTINGS
    }
    return ScannerProfile(
        **{
            setting: _scale_setting(MAX_PROFILE, setting, u if setting == "lamp" else float(u[0]))
            for setting, u in amounts.items()
        }
    )


PROFILE_SETTINGS = fields(ScannerProfile)[1:]
BIDIRECTIONAL_SETTINGS = {"azure", "eosin", "hue_shift", "lamp", "gamma"}
MAX_PROFILE = ScannerProfile(
    azure=1.6,
    eosin=1.6,
    hue_shift=30.0,
    lamp=(1.35, 1.35, 1.35),
    vignette=0.35,
    blur=1.2,
    resolution=0.5,
    noise=0.025,
    gamma=1.2,
    sharpen=1.5,
    jpeg=45.0,
)
SCANNER_PROFILES: Mapping[str, ScannerProfile] = {
    "reference": ScannerProfile(),
    "soft_focus": ScannerProfile("slightly out of focus", blur=1.3),
    "pale_stain": ScannerProfile("old stain, washed out", azure=0.6, eosin=0.55, lamp=(1.06, 1.06, 1.06)),
    "blue_filter": ScannerProfile("daylight filter in the lamp: bluish glass", lamp=(0.82, 0.95, 1.22)),
    "green_cast": ScannerProfile("camera never white-balanced: greenish glass", lamp=(0.85, 1.1, 0.82), gamma=1.1),
    "acid_buffer": ScannerProfile("buffer too acid: reddish cells", azure=0.7, eosin=1.3, hue_shift=20.0),
    "warm_lamp": ScannerProfile(
        "old tungsten lamp: orange glass, soft", hue_shift=12.0, lamp=(1.3, 0.98, 0.55), blur=0.8, noise=0.01
    ),
    "dark_giemsa": ScannerProfile(
        "overstained in an alkaline buffer: dark, blue-violet cells",
        azure=2.0,
        eosin=1.9,
        hue_shift=-35.0,
        lamp=(0.86, 0.82, 1.02),
    ),
    "old_camera": ScannerProfile(
        "few pixels, noisy, strongly compressed, greenish and dim",
        azure=1.4,
        eosin=1.4,
        lamp=(0.66, 0.86, 0.62),
        resolution=0.45,
        noise=0.02,
        jpeg=45.0,
    ),
    "phone": ScannerProfile(
        "telephone at the eyepiece: bright, cold, sharpened, dark towards the corners",
        eosin=0.75,
        lamp=(1.22, 1.32, 1.48),
        vignette=0.35,
        sharpen=1.6,
        jpeg=60.0,
    ),
}
