"""Names of the image-quality measures and their texts, without torch because edge machines import them too."""

from __future__ import annotations

MAX_FEATURES = 32  # larger feature vectors are projected, because sites send their covariance
NEUTRAL_MEASURES = {"center_darkness": 0.5}  # the neutral value of a measure; 0 for the others
# name -> (text for a value that is too low, too high)
QUALITY_MEASURES: dict[str, tuple[str, str]] = {
    "brightness": ("too dark", "too bright"),
    "contrast": ("too flat", "too harsh"),
    "sharpness": ("blurred", "noisy"),
    "color": ("too little color", "too much color"),
    "center_darkness": ("nothing dark in the center", "much darker in the center"),
}
