"""Names and words of the numbers that describe an image; no torch, for bedside machines read them too."""

from __future__ import annotations

MAX_FEATURES = 32  # at most so many numbers of the last features are kept: their covariance is what travels
NEUTRAL_MEASURES = {"middle": 0.5}  # where there is neither little nor much of a measure; 0 for the others
# name -> (what an image is that has too little of it, too much of it)
QUALITY_MEASURES: dict[str, tuple[str, str]] = {
    "brightness": ("too dark", "too bright"),
    "contrast": ("too flat", "too harsh"),
    "sharpness": ("blurred", "noisy"),
    "colour": ("too little colour", "too much colour"),
    "middle": ("nothing dark in the middle", "much darker in the middle"),
}
